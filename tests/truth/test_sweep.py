"""The same as test_public over the drawn cases of ``sweep.jsonl`` (calibration/measure_cases.py), outside CI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from truth_cases import cases, device_of, measured, workload_of

from fxmem import api

HERE = Path(__file__).parent
CASES = {case["id"]: case for case in cases(HERE / "sweep.jsonl")}
DEVIATIONS = json.loads((HERE / "deviations.json").read_text())

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(not torch.__version__.startswith("2.14"), reason="the truth was measured with torch 2.14"),
]


@pytest.mark.parametrize("case", sorted(CASES))
def test_peaks_equal_the_allocators(case):
    args, truth = CASES[case]["args"], CASES[case]["truth_ws0"]
    e = api.estimate(args["model"], workload=workload_of(args), device=device_of(CASES[case]), law=False)
    allocated, reserved = measured(truth)
    most = DEVIATIONS.get(case, {"allocated": 0.0, "reserved": 0.0})
    assert abs(e.peak.allocated_bytes - allocated) <= most["allocated"] * allocated
    assert abs(e.peak.reserved_bytes - reserved) <= most["reserved"] * reserved
