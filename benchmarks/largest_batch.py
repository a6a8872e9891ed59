"""Time of an answer after the trace: the largest batch under other limits, and the server's questions.

    python benchmarks/largest_batch.py [TARGET]

Prints the events of the tape, then seconds for the first answer and for further ones.
"""

from __future__ import annotations

import sys
import time

import fxmem
from fxmem import api
from fxmem.allocator_config import AllocatorConfig
from fxmem.batch import Limits, largest

DEVICES = ("a100-80gb", "h100", "t4", "rtx-4090")


def main(target: str = "hf:gpt2") -> None:
    workload = fxmem.Workload(mode=fxmem.Mode.TRAINING, seq=1024)
    run = api._Run(target, workload, fxmem.find_device("h100"), inputs=None, loss=None)
    began = time.perf_counter()
    program, first = api._along_batch(run)
    print(f"{target}: traced in {time.perf_counter() - began:.2f} s, {len(first.events)} events in two steps")
    for device in DEVICES:
        for safety in (0.9, 0.8):
            limits = Limits(capacity_bytes=fxmem.find_device(device).capacity_bytes or 0, safety=safety)
            began = time.perf_counter()
            answer = largest(program, AllocatorConfig(), limits)
            print(f"{device} x {safety}: batch {answer.batch} in {(time.perf_counter() - began) * 1e3:.0f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
