"""What fits and what does not, as PyTorch's own allocator on the phantom device says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import fxmem

ROOT = Path(__file__).parents[2]
PHANTOM = ROOT / "calibration" / "phantom"
CASES = ROOT / "tests" / "cases"
pytestmark = [pytest.mark.phantom, pytest.mark.slow]

LLAMA = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8,
         "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 65536}  # fmt: skip

LOOP = """
import importlib.util, json, sys, torch
spec = importlib.util.spec_from_file_location("case", sys.argv[1])
case = importlib.util.module_from_spec(spec); spec.loader.exec_module(case)
size = int(sys.argv[2])
try:
    net = case.model().cuda()
    x = case.inputs(1, image=size).cuda() if sys.argv[3] == "image" else case.inputs(size).cuda()
    optimizer = getattr(torch.optim, sys.argv[4])(net.parameters(), lr=1e-3)
    for _ in range(3):
        output = net(x)
        loss = case.loss(output) if hasattr(case, "loss") else output.float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    print(json.dumps({"fits": True, "reserved": torch.cuda.max_memory_reserved()}))
except torch.cuda.OutOfMemoryError:
    print(json.dumps({"fits": False}))
"""


def run(python: str, sm: int, gib: float, *arguments: str | Path) -> dict[str, object]:
    """The last line of a script on the phantom device."""
    environment = os.environ | {"PHANTOM_PYTHON": python, "PHANTOM_SM": str(sm), "PHANTOM_MEM_GIB": str(gib),
                                "PHANTOM_CUDNN": "stub"}  # fmt: skip
    command = [PHANTOM / "phantom_run", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("attention", "longest"), [("eager", 6811), ("sdpa", 18907)])
def test_the_longest_sequence(attention, longest, python):
    """Quadratic and linear in the length; tests/torch_side/test_batch_truth.py holds fxmem against the same lengths."""
    for seq, fits in ((longest, True), (longest + 1, False)):
        found = run(
            python, 90, 14.4, PHANTOM / "measure.py", "--model", "hf:llama", "--mode", "train", "--batch", "1",
            "--steps", "3", "--optimizer", "adamw", "--attn", attention, "--seq", str(seq), "--keep-outputs",
            "--override", json.dumps(LLAMA),
        )  # fmt: skip
        assert ("error" not in found) is fits, found


CASE_LIMITS = [
    ("gpt2_loss.py", "batch", "AdamW", 14.73, 75),
    ("bert_large.py", "batch", "AdamW", 14.69, 80),
    ("unet.py", "image", "SGD", 23.64, 89),
]


@pytest.mark.parametrize(("file", "axis", "optimizer", "gib", "sm"), CASE_LIMITS, ids=[row[0] for row in CASE_LIMITS])
def test_the_largest_of_a_case(file, axis, optimizer, gib, sm, python):
    report = fxmem.max_batch(
        str(CASES / file), device=fxmem.find_device(f"{gib}GiB", arch=f"sm_{sm}", context=0), safety=1,
        mode=fxmem.Mode.TRAINING, optimizer=optimizer.lower(), conv_workspace=fxmem.ConvWorkspace.NONE,
        vary=fxmem.Vary("image", 256, 4096) if axis == "image" else None, multiple_of=None,
    )  # fmt: skip
    answer = report.best.answer
    assert answer.next is not None
    found = run(python, sm, gib, "-c", LOOP, CASES / file, str(answer.batch), axis, optimizer)
    assert found == {"fits": True, "reserved": answer.reserved_bytes}
    assert run(python, sm, gib, "-c", LOOP, CASES / file, str(answer.next.batch), axis, optimizer) == {"fits": False}
