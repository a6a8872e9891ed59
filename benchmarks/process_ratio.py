"""Whole processes: the estimate of ResNet-50 training against a script that only runs one such step on fake tensors.

python benchmarks/process_ratio.py [--rounds 5]

Wall-clock seconds, the two commands alternating; the median of the paired ratios is what counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

BARE = """
import torch, torchvision
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode(allow_non_fake_inputs=True):
    model = torchvision.models.resnet50()
    model.train()
    x, y = torch.zeros(8, 3, 224, 224), torch.zeros(8, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COMMANDS = {
    "import torch": [sys.executable, "-c", "import torch"],
    "bare step": [sys.executable, "-W", "ignore", "-c", BARE],
    "estimate": [
        sys.executable, "-m", "fxmem", "estimate", "torchvision:resnet50", "--mode", "training", "--batch", "8",
        "--conv-workspace", "none",
    ],
    "estimate with cuDNN's workspaces": [
        sys.executable, "-m", "fxmem", "estimate", "torchvision:resnet50", "--mode", "training", "--batch", "8",
    ],
    "help": [sys.executable, "-m", "fxmem", "--help"],
}  # fmt: skip


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.rounds + 1):
        for name, command in COMMANDS.items():
            times[name].append(seconds(command))
    bare = times["bare step"][1:]
    for name, taken in times.items():
        ratio = statistics.median(t / b for t, b in zip(taken[1:], bare))
        row = {"command": name, "median_s": round(statistics.median(taken[1:]), 2), "of_bare_step": round(ratio, 2)}
        print(json.dumps(row))


if __name__ == "__main__":
    main()
