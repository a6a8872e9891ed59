"""Optimizers, clipping, scaling and recurrent layers beside PyTorch's own on the phantom device."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from sweeping import first_of

ROOT = Path(__file__).parents[2]
PROBE = ROOT / "calibration" / "kernel_probe.py"
PHANTOM = ROOT / "calibration" / "phantom" / "phantom_run"
pytestmark = [pytest.mark.phantom, pytest.mark.slow]

PROGRAMS = {
    "optimizers": "optx_ada,optx_nadam,optx_radam,optx_sgd,optx_rprop,optx_rms,optx_m,optx_groups,optx_some",
    "loops": "loop_,clipx_",
    "recurrent": "rx_lstm,rx_gru,rx_rnn,rx_packed,rx_loop,rx_tagger",
}
DEVICES = {"80": "a100-80gb", "90": "h200"}


@pytest.mark.parametrize("sm", first_of(["90", *sorted(set(DEVICES) - {"90"})]))
@pytest.mark.parametrize("programs", PROGRAMS)
def test_events_agree(programs, sm, python, tmp_path):
    measured = tmp_path / "measured.json"
    environment = os.environ | {"PHANTOM_PYTHON": python, "PHANTOM_SM": sm, "PHANTOM_CUDNN": "stub"}
    with measured.open("w") as out:
        command = [PHANTOM, PROBE, "--measure", "--only", PROGRAMS[programs]]
        subprocess.run(command, env=environment, stdout=out, stderr=subprocess.PIPE, check=True)
    done = subprocess.run(
        [python, PROBE, "--compare", measured, "--only", PROGRAMS[programs], "--device", DEVICES[sm]],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    verdict = done.stdout.splitlines()[-1]
    assert " agree, 0 do not" in verdict, verdict
