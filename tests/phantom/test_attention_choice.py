"""The back end of each attention call, as PyTorch's own CUDA build chooses it on the phantom device."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import zlib
from pathlib import Path

import pytest
from sweeping import first_of

ROOT = Path(__file__).parents[2]
PHANTOM = ROOT / "calibration" / "phantom" / "phantom_run"
GOLDEN = ROOT / "tests" / "golden" / "attention_choice.json"
pytestmark = [pytest.mark.phantom, pytest.mark.slow]


@pytest.mark.parametrize("sm", first_of([90, 75, 80, 86, 89, 100, 120]))
def test_golden_is_what_pytorch_chooses(sm, python, update_golden):
    done = subprocess.run(
        [PHANTOM, ROOT / "tests" / "attention_cases.py"],
        env=os.environ | {"PHANTOM_PYTHON": python, "PHANTOM_SM": str(sm), "PHANTOM_CUDNN": "stub"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    chosen = done.stdout.strip()
    known = json.loads(GOLDEN.read_text(encoding="utf-8"))
    if update_golden:
        known[str(sm)] = base64.b85encode(zlib.compress(chosen.encode(), 9)).decode()
        GOLDEN.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    assert zlib.decompress(base64.b85decode(known[str(sm)])).decode() == chosen
