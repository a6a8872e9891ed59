"""Strides of results and gradients beside PyTorch's own on the phantom: fake kernels follow the CPU in some."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from layouts import table

import fxmem

ROOT = Path(__file__).parents[2]
PHANTOM = ROOT / "calibration" / "phantom" / "phantom_run"
pytestmark = [pytest.mark.phantom, pytest.mark.slow]


def test_results_lie_as_on_cuda(python, tmp_path):
    environment = os.environ | {"PHANTOM_PYTHON": python, "PHANTOM_CUDNN": "stub"}
    command = [PHANTOM, "-W", "ignore", ROOT / "tests" / "layouts.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    real = json.loads(done.stdout)
    written = tmp_path / "found.json"  # fxmem restores what a forward pass changes in a closure

    class Calls(torch.nn.Module):
        def forward(self, x):
            with torch.enable_grad():
                written.write_text(json.dumps(table(x.device)))
            return x

    fxmem.trace(Calls(), lambda batch: torch.zeros(batch, 1), batch=1, steps=1)
    found = json.loads(written.read_text())
    differ = {name: (lies, found[name]) for name, lies in real.items() if lies != found[name]}
    assert len(real) > 700
    assert not differ
