"""The README's example is what fxmem prints: example -> golden file -> README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GOLDEN = ROOT / "tests" / "golden" / "example.txt"
COMMAND = "estimate examples/model.py --mode training --batch 32 --device t4"
BLOCK = re.compile(r"(?<=<!-- golden -->\n).*?(?=<!-- /golden -->)", re.DOTALL)


def torch_release():
    import torch

    return torch.__version__.partition("+")[0]


@pytest.mark.skipif(torch_release() != "2.14.1", reason="the golden file was made with torch 2.14.1")
def test_example_is_golden(golden):
    words = [sys.executable, "-m", "fxmem", *COMMAND.split()]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    text = re.sub(r"torch ([0-9.]+)\+\w+", r"torch \1", result.stdout)
    golden("example.txt", f"$ fxmem {COMMAND}\n{text}")


def test_readme_shows_the_golden_file(update_golden):
    wanted = f"```\n{GOLDEN.read_text(encoding='utf-8')}```\n"
    text = README.read_text(encoding="utf-8")
    if update_golden:
        README.write_text(BLOCK.sub(lambda _: wanted, text), encoding="utf-8")
    assert BLOCK.search(README.read_text(encoding="utf-8")).group() == wanted
