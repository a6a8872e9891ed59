"""Direct operator calls beside PyTorch's own on the phantom device (calibration/probe_*.py)."""

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
    "convolution, indexing, sorting": "kc_fw_2d_,kc_bw_2d_c.,kc_bw_dw_cl,k_embedding_bw,k_index_put_acc,k_sort_5,"
    "k_topk_5,k_cumsum_5,k_roll,kp_max_pool_bw,kp_softmax_bw,kp_native_dropout",
    "reductions, losses, normalisation": "red_sum-,red_argmax-,red_var_mean-,red_huge-,bn_big_train_,gn_big_32-,"
    "ln_tall-,rms_tall-",
    "Fourier transforms": "kf_rfftn_sliced,kf_fftn_transposed,kf_irfftn_expanded,kf_fft_odd,kf_layer,kf_stft",
}
"""Several layouts, both sides of every threshold; large enough that the recorder, which computes small tensors for
real, runs them all on fake ones."""

DEVICES = {"75": "t4", "80": "a100-80gb", "90": "h200", "120": "rtx-5090"}


@pytest.mark.parametrize("programs", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.parametrize("sm", first_of(["90", *sorted(set(DEVICES) - {"90"})]))
def test_events_agree(sm, programs, python, tmp_path):
    measured = tmp_path / "measured.json"
    environment = os.environ | {"PHANTOM_PYTHON": python, "PHANTOM_SM": sm, "PHANTOM_CUDNN": "stub"}
    with measured.open("w") as out:
        command = [PHANTOM, PROBE, "--measure", "--only", programs]
        subprocess.run(command, env=environment, stdout=out, stderr=subprocess.PIPE, check=True)
    done = subprocess.run(
        [python, PROBE, "--compare", measured, "--only", programs, "--device", DEVICES[sm]],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    verdict = done.stdout.splitlines()[-1]
    assert " agree, 0 do not" in verdict, verdict
