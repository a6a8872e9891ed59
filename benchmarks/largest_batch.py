"""Time of an answer after the trace: the largest batch under other limits.

    python benchmarks/largest_batch.py [TARGET] [STEPS]

Prints the events of the whole tape, then milliseconds for the answer on each device and with each safety factor.
The first answer prepares what the others use.
"""

from __future__ import annotations

import sys
import time

import fxmem
from fxmem import api
from fxmem.allocator_config import AllocatorConfig
from fxmem.batch import Limits, largest

DEVICES = ("a100-80gb", "h100", "t4", "rtx-4090", "a6000", "h200")


def main(target: str = "hf:gpt2", steps: str = "4") -> None:
    workload = fxmem.Workload(mode=fxmem.Mode.TRAINING, seq=1024, steps=int(steps))
    run = api._Run(target, workload, fxmem.find_device("h100"), inputs=None, loss=None)
    began = time.perf_counter()
    program, _ = api._along_batch(run)
    tape = program.at(2)
    print(f"{target}: traced in {time.perf_counter() - began:.2f} s, {len(tape.events) if tape else 0} events")
    for device in DEVICES:
        for safety in (0.9, 0.8, 0.7):
            limits = Limits(capacity_bytes=fxmem.find_device(device).capacity_bytes or 0, safety=safety)
            began = time.perf_counter()
            answer = largest(program, AllocatorConfig(), limits)
            print(f"{device} x {safety}: batch {answer.batch} in {(time.perf_counter() - began) * 1e3:.0f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
