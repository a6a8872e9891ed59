"""Recorded trace against the same steps under bare FakeTensorMode, alternating in one process.

python benchmarks/trace_ratio.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fxmem.cuda import personality
from fxmem.device import find_device
from fxmem.optimizers import make_optimizer
from fxmem.recording.memo import forget
from fxmem.recording.recorder import Recorder
from fxmem.run import default_loss, run
from fxmem.source import load
from fxmem.workload import Mode, Workload

LLAMA_8B = (
    ("hidden_size", 4096), ("intermediate_size", 14336), ("num_hidden_layers", 32), ("num_attention_heads", 32),
    ("num_key_value_heads", 8), ("vocab_size", 128256),
)  # fmt: skip
CASES = {
    "resnet50": ("torchvision:resnet50", Workload(mode=Mode.TRAINING, batch=8)),
    "gpt2": ("hf:gpt2", Workload(mode=Mode.TRAINING, batch=4, seq=256)),
    "llama-8b": ("hf:llama", Workload(mode=Mode.TRAINING, batch=1, seq=512, dtype="bfloat16", model_args=LLAMA_8B)),
}
STEPS = 2


def bare(source, workload):
    """The reference loop on fake tensors, nothing recorded."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_mode = next(source.module.parameters()).fake_mode
    with source.opened() as model:
        inputs = source.inputs(workload.batch)
        model.train()
        began = time.perf_counter()
        with fake_mode:
            params = list(model.parameters())
            optimizer = make_optimizer(workload.optimizer, params, foreach=workload.foreach)
            for _ in range(STEPS):
                y = model(*inputs.args, **inputs.kwargs)
                loss = default_loss(y, inputs.target)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        del mode
        return time.perf_counter() - began


def recorded(source, workload, fake_mode):
    recorder = Recorder(fake_mode)
    with source.opened():
        inputs = source.inputs(workload.batch)
        began = time.perf_counter()
        with personality(recorder, find_device("h200")), recorder:
            run(source, [inputs], workload, recorder, STEPS)
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for name, (target, workload) in CASES.items():
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        source = load(target, workload, fake_mode)
        times: dict[str, list[float]] = {"bare": [], "recorded": []}
        for _ in range(options.rounds + 1):
            FakeTensorMode.cache_clear()
            times["bare"].append(bare(source, workload))
            FakeTensorMode.cache_clear()
            forget(fake_mode)  # both start cold
            times["recorded"].append(recorded(source, workload, fake_mode))
        medians = {k: statistics.median(v[1:]) for k, v in times.items()}
        ratio = statistics.median(r / b for b, r in zip(times["bare"][1:], times["recorded"][1:]))
        print(
            json.dumps(
                {
                    "case": name,
                    "steps": STEPS,
                    "torch": torch.__version__,
                    "bare_s": round(medians["bare"], 3),
                    "recorded_s": round(medians["recorded"], 3),
                    "ratio": round(ratio, 3),
                }
            )
        )


if __name__ == "__main__":
    main()
