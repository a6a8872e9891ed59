"""A server that batches what waits, and never more than fits: `python examples/server.py`.

At start-up one estimate for each of a few sequence lengths, then each turn of the loop takes what waits
and runs it in batches that fit. Nothing here needs a GPU except `answer`.
"""

from __future__ import annotations

import queue
import random
import threading
import time

import torch
from torch import nn

import fxmem
from fxmem.batching import MemoryBudget, Policy, Request, plan

LENGTHS = (64, 256, 1024)
WIDTH = 256
POLICY = Policy(max_wait=0.05, max_padding=0.5)


def model() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)


def make_budget(device: str = "t4") -> MemoryBudget:
    gpu = fxmem.find_device(device, context=300 << 20)
    estimates = {
        length: fxmem.estimate(model, lambda batch, length=length: torch.zeros(batch, length, WIDTH), device=gpu)
        for length in LENGTHS
    }
    return MemoryBudget(estimates, gpu)


def answer(net: nn.Module, tensors: list[torch.Tensor], length: int) -> torch.Tensor:
    """Pad to the batch's length and run."""
    padded = torch.stack([nn.functional.pad(x, (0, 0, 0, length - len(x))) for x in tensors])
    with torch.inference_mode():
        return net(padded.cuda())


def serve(inbox: queue.Queue[Request | None], budget: MemoryBudget, run) -> None:
    """Run what waits until ``None`` comes; what the budget says nothing of, or never fits, is refused."""
    refused: list[Request] = []
    while (first := inbox.get()) is not None:
        waiting = [first]
        while not inbox.empty() and len(waiting) < 1000:
            request = inbox.get_nowait()
            if request is None:
                inbox.put(None)
                break
            waiting.append(request)
        found = plan(waiting, budget, POLICY, now=time.monotonic())
        refused += found.impossible
        for batch in found.batches:
            run(batch)
    longer = sum(request.seq > LENGTHS[-1] for request in refused)
    for count, why in ((longer, f"the estimates stop at {LENGTHS[-1]} tokens"), (len(refused) - longer, "too large")):
        if count:
            print(f"{count} requests refused: {why}")  # noqa: T201


def main() -> None:
    budget = make_budget()
    for length in LENGTHS:
        print(f"length {length}: at most {budget.largest(length)} samples")  # noqa: T201
    inbox: queue.Queue[Request | None] = queue.Queue()
    done: list[int] = []
    worker = threading.Thread(target=serve, args=(inbox, budget, lambda batch: done.append(batch.samples)))
    worker.start()
    for number in range(2000):
        inbox.put(Request(id=number, seq=random.choice((20, 200, 900, 2000)), arrived=time.monotonic()))  # noqa: S311
    inbox.put(None)
    worker.join()
    print(f"{sum(done)} samples in {len(done)} batches")  # noqa: T201


if __name__ == "__main__":
    main()
