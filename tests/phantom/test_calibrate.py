"""`fxmem calibrate` and `fxmem diff` beside PyTorch's own allocator on the phantom device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fxmem import receipt

ROOT = Path(__file__).parents[2]
PHANTOM = ROOT / "calibration" / "phantom"
pytestmark = [pytest.mark.phantom, pytest.mark.slow]

MODEL = """
import torch
from torch import nn
def model():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
def inputs(batch):
    return torch.zeros(batch, 64)
"""
FAULT = """
import sys
from fxmem.cli import main
import fxmem.kernels
expand = sys.modules["fxmem.kernels.expand"]
expand.RULES = {name: rule for name, rule in expand.RULES.items() if "mm" not in name}
main(sys.argv[1:])
"""


@pytest.fixture
def place(tmp_path, python, monkeypatch):
    monkeypatch.setenv("PHANTOM_PYTHON", python)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "fault.py").write_text(FAULT)
    return tmp_path


def command(place, *words, start=("-m", "fxmem")):
    output = ("--output", str(place / "r.json"))
    return [PHANTOM / "phantom_run", *start, "calibrate", str(place / "model.py"), *words, *output]


ENVIRONMENT = {"PHANTOM_CUDNN": "stub", "PYTHONPATH": str(ROOT), "TORCH_CPP_LOG_LEVEL": "ERROR"}


def run(place, *words, **options):
    return subprocess.run(
        command(place, *words, **options), env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False
    )


def test_exact(place):
    done = run(place, "--mode", "training", "--batches", "1,2", "--repeats", "2")
    assert done.returncode == 0, done.stderr
    found = receipt.read(place / "r.json")
    assert "exact" in found["verdict"], done.stdout
    assert [entry["status"] for entry in found["entries"]] == ["measured"] * 2
    assert len(found["entries"][0]["repeats"]) == 2
    assert found["environment"]["gpu"]["phantom"]


def test_a_rule_that_is_missing_shows_in_the_workspaces(place):
    done = run(place, "--batches", "1", "--repeats", "1", start=(str(place / "fault.py"),))
    assert done.returncode == 0, done.stderr
    (entry,) = receipt.read(place / "r.json")["entries"]
    assert entry["residual"]["workspaces"] >= 2**20
    assert (entry["residual"]["model"], entry["residual"]["inputs"]) == (0, 0)


@pytest.mark.parametrize("seconds", [2.5, 6.5])
def test_killed(place, seconds):
    process = subprocess.Popen(
        command(place, "--batches", "1,2", "--repeats", "1"), env=os.environ | ENVIRONMENT, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for path in place.glob("r.json*"):
        if path.suffix != ".new":
            receipt.read(path)
    assert run(place, "--batches", "1,2", "--repeats", "1").returncode == 0
    assert len(receipt.read(place / "r.json")["entries"]) == 2


def test_a_snapshot_of_gpt2_training(place):
    words = ["--mode", "train", "--batch", "1", "--seq", "32", "--steps", "3", "--keep-outputs", "--dtype", "fp32"]
    for model, name in (("hf:gpt2", "same"), (f"py:{ROOT}/tests/phantom/planted.py:build", "planted")):
        path = place / f"{name}.pickle"
        measure = [PHANTOM / "phantom_run", PHANTOM / "measure.py", "--model", model, *words, "--snapshot", path]
        subprocess.run(measure, env=os.environ | ENVIRONMENT, capture_output=True, check=True)
        diff = [os.environ["PHANTOM_PYTHON"], "-m", "fxmem", "diff", "hf:gpt2", path, "--mode", "training",
                "--batch", "1", "--seq", "32", "--format", "json"]  # fmt: skip
        done = subprocess.run(diff, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["same"] == (name == "same")
        if name == "planted":
            (group,) = found["extra"]
            assert (group["count"], group["nbytes"]) == (3, 32 * 768 * 4)
            assert group["line"].endswith("planted.py:16")
            assert not found["missing"]
