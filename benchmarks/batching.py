"""Time of a server's questions: 100,000 requests planned, and one answer of the budget.

    python benchmarks/batching.py

The budget is of a small transformer at five lengths, made in some seconds.
"""

from __future__ import annotations

import random
import time

import torch
from torch import nn

import fxmem
from fxmem.batching import MemoryBudget, Policy, Request, plan

LENGTHS = (64, 128, 256, 512, 1024)
REQUESTS = 100_000
POLICIES = {
    "packed": Policy(),
    "in order": Policy(keep_order=True),
    "overdue first, little padding": Policy(max_wait=1.0, max_padding=0.3),
}


def model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, nhead=4, dim_feedforward=1024, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)


def main() -> None:
    gpu = fxmem.find_device("t4", context=300 << 20)
    budget = MemoryBudget(
        {length: fxmem.estimate(model, lambda batch, n=length: torch.zeros(batch, n, 256), device=gpu)
         for length in LENGTHS}, gpu,
    )  # fmt: skip
    draw = random.Random(1)
    requests = [
        Request(id=i, samples=draw.randint(1, 8), seq=draw.randint(1, LENGTHS[-1]), arrived=i / 100)
        for i in range(REQUESTS)
    ]
    for name, policy in POLICIES.items():
        began = time.perf_counter()
        found = plan(requests, budget, policy, now=REQUESTS / 100)
        seconds = time.perf_counter() - began
        print(f"{name}: {REQUESTS} requests into {len(found.batches)} batches in {seconds:.2f} s")
    began = time.perf_counter()
    for request in requests:
        budget.fits(request.samples, request.seq)
    print(f"fits: {(time.perf_counter() - began) / REQUESTS * 1e6:.2f} us")


if __name__ == "__main__":
    main()
