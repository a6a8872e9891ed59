"""Estimates against peaks that PyTorch's own CUDA allocator reported, byte for byte.

``public.jsonl`` was measured on the phantom device (calibration/phantom/README.md). A case that
may differ stands in ``deviations.json`` with the reason and the most that it may be off.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from truth_cases import cases, device_of, measured, workload_of

from fxmem import api

HERE = Path(__file__).parent
CASES = {case["id"]: case for case in cases(HERE / "public.jsonl")}
DEVIATIONS = json.loads((HERE / "deviations.json").read_text())
MEASURED_WITH = "2.14"

pytestmark = pytest.mark.skipif(
    not torch.__version__.startswith(MEASURED_WITH), reason=f"the truth was measured with torch {MEASURED_WITH}"
)


@pytest.mark.parametrize("case", sorted(CASES))
def test_peaks_equal_the_allocators(case):
    args, truth = CASES[case]["args"], CASES[case]["truth_ws0"]
    pytest.importorskip({"hf": "transformers"}.get(args["model"].split(":")[0], args["model"].split(":")[0]))
    e = api.estimate(args["model"], workload=workload_of(args), device=device_of(CASES[case]), law=False)
    allocated, reserved = measured(truth)
    if case in DEVIATIONS:
        most = DEVIATIONS[case]
        assert e.peak.allocated_bytes == pytest.approx(allocated, rel=most["allocated"])
        assert e.peak.reserved_bytes == pytest.approx(reserved, rel=most["reserved"])
    else:
        assert (e.peak.allocated_bytes, e.peak.reserved_bytes) == (allocated, reserved)


def test_nearly_all_cases_are_exact():
    assert len(set(DEVIATIONS) & set(CASES)) <= len(CASES) // 10
