"""60 timm models drawn with random.Random(0): how many are estimated, in training and inference.

python benchmarks/timm_sweep.py [--count 60] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import time

import timm

from fxmem import api
from fxmem.errors import FxmemError
from fxmem.workload import Mode


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names = random.Random(options.seed).sample(timm.list_models(), options.count)
    whole = 0
    for name in names:
        words = []
        for mode in (Mode.INFERENCE, Mode.TRAINING):
            began = time.perf_counter()
            try:
                e = api.estimate(f"timm:{name}", mode=mode, batch=2, law=False)
                words.append(f"{mode} {e.peak.allocated_bytes / 2**20:.0f} MiB {time.perf_counter() - began:.1f}s")
            except FxmemError as error:
                words.append(f"{mode} REFUSED {type(error).__name__} {error}".replace("\n", " "))
            except Exception as error:
                words.append(f"{mode} BROKEN {type(error).__name__} {error}".replace("\n", " "))
        whole += not any("REFUSED" in w or "BROKEN" in w for w in words)
        print(f"{name:45}", " | ".join(words), flush=True)
    print(f"{whole} of {len(names)} models estimated in both modes")


if __name__ == "__main__":
    main()
