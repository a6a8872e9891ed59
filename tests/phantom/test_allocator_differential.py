"""fxmem's allocator beside PyTorch's own, on the phantom device (calibration/allocator_differential.py)."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from fxmem.allocator import AllocatorConfig
from fxmem.errors import UsageError

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "calibration" / "allocator_differential.py"
pytestmark = [pytest.mark.phantom, pytest.mark.slow]


@pytest.fixture(scope="module")
def environment(python) -> dict[str, str]:
    return os.environ | {"PHANTOM_PYTHON": python, "TORCH_CPP_LOG_LEVEL": "ERROR"}


def test_random_traces(environment):
    done = subprocess.run(
        [environment["PHANTOM_PYTHON"], SCRIPT, "--traces", "84"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "84 of 84 traces equal" in done.stdout


SETTINGS = [
    "",
    "max_split_size_mb:19",
    "max_split_size_mb:20",
    " max_split_size_mb : 128 , expandable_segments : True,",
    "max_split_size_mb:32,large_segment_size_mb:64",
    "max_split_size_mb:64,large_segment_size_mb:64",
    "max_non_split_rounding_mb:30,large_segment_size_mb:64",
    "large_segment_size_mb:10",
    "large_segment_size_mb:11",
    "garbage_collection_threshold:0.0",
    "garbage_collection_threshold:0.5",
    "garbage_collection_threshold:1.0",
    "per_process_memory_fraction:0",
    "per_process_memory_fraction:1.1",
    "expandable_segments:true",
    "throw_on_cudamalloc_oom:True",
    "pinned_use_background_threads:True",
    "color:blue",
    ",max_split_size_mb:128",
    "max_split_size_mb",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:0",
    "roundup_power2_divisions:3",
    "roundup_power2_divisions:[]",
    "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]",
    "roundup_power2_divisions:[>:4]",
    "roundup_power2_divisions:[8:2]",
    "roundup_power2_divisions:[64:2,8:4]",
    "roundup_power2_divisions:[131072:2,>:8]",
    "roundup_power2_divisions:[>:8,4:2]",
    "roundup_power2_divisions:[4:2,>:8,16:4]",
    "roundup_power2_divisions:[255:1]",
    "roundup_power2_divisions:[256:1,]",
    "roundup_power2_divisions:[256:1 512:2]",
    "roundup_power2_divisions:[256:1,512:2",
]
PROBE = """
import sys, torch
torch.cuda.init()
for text in sys.stdin.read().split("\\n"):
    try:
        torch._C._accelerator_setAllocatorSettings(text)
    except (ValueError, RuntimeError, IndexError):
        print("refused")
    else:
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        print(settings["max_split_size"], *settings["roundup_power2_divisions"].values())
"""


def test_settings_are_read_alike(environment):
    done = subprocess.run(
        [ROOT / "calibration" / "phantom" / "phantom_run", "-c", PROBE],
        env=environment, input="\n".join(SETTINGS), capture_output=True, text=True, check=True,
    )  # fmt: skip
    theirs = [line for line in done.stdout.splitlines() if re.fullmatch(r"refused|-?[0-9 ]+", line)]
    assert dict(zip(SETTINGS, map(read, SETTINGS), strict=True)) == dict(zip(SETTINGS, theirs, strict=True))


def read(text: str) -> str:
    try:
        config = AllocatorConfig.parse(text)
    except UsageError:
        return "refused"
    limit = -1 if config.max_split_size is None else config.max_split_size
    return " ".join(map(str, (limit, *config.roundup_power2_divisions)))
