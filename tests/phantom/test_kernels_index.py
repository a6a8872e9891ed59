"""Convolutions, indexing, sorting and resampling beside PyTorch's own on the phantom (calibration/probe_*.py)."""

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

PROGRAMS = (
    "kc_fw_2d_,kc_bw_2d_c.,kc_bw_dw_cl,k_embedding_bw,k_index_put_acc,k_sort_5,k_topk_5,k_cumsum_5,k_roll,"
    "kp_max_pool_bw,kp_softmax_bw,kp_native_dropout"
)
"""Direct operator calls: several layouts, both sides of every threshold."""

DEVICES = {"75": "t4", "80": "a100-80gb", "90": "h200", "120": "rtx-5090"}


@pytest.mark.parametrize("sm", first_of(["90", *sorted(set(DEVICES) - {"90"})]))
def test_events_agree(sm, python, tmp_path):
    measured = tmp_path / "measured.json"
    environment = os.environ | {"PHANTOM_PYTHON": python, "PHANTOM_SM": sm, "PHANTOM_CUDNN": "stub"}
    with measured.open("w") as out:
        command = [PHANTOM, PROBE, "--measure", "--only", PROGRAMS]
        subprocess.run(command, env=environment, stdout=out, stderr=subprocess.PIPE, check=True)
    done = subprocess.run(
        [python, PROBE, "--compare", measured, "--only", PROGRAMS, "--device", DEVICES[sm]],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    verdict = done.stdout.splitlines()[-1]
    assert " agree, 0 do not" in verdict, verdict
