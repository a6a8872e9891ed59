"""What holds for the package as a whole: budgets, public names, where torch is loaded."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fxmem

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "fxmem").rglob("*.py"))
FILE_LINES, FUNCTION_LINES, CLASS_LINES = 400, 40, 250


def spot(path):
    return str(path.relative_to(ROOT))


def code_lines(node):
    """Lines of a definition without its docstring."""
    lines = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if ast.get_docstring(node) is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


@pytest.mark.parametrize("path", FILES, ids=spot)
def test_budget(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert code_lines(node) <= FUNCTION_LINES, f"{node.name} is too long"
        if isinstance(node, ast.ClassDef):
            assert code_lines(node) <= CLASS_LINES, f"{node.name} is too long"


@pytest.mark.parametrize("name", ["utils", "common", "helpers", "base", "types"])
def test_no_room_for_odds_and_ends(name):
    assert not [path for path in FILES if path.stem == name]


@pytest.mark.parametrize("name", fxmem.__all__)
def test_public_names(name):
    assert getattr(fxmem, name).__name__ == name
    assert name in dir(fxmem)


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fxmem.nothing  # noqa: B018


def python(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr


def test_a_function_is_not_hidden_by_the_submodule_of_its_name():
    python("import fxmem.estimate, fxmem.trace, fxmem; assert callable(fxmem.estimate) and callable(fxmem.trace)")
    python("from fxmem.estimate import Estimate; from fxmem import estimate; assert callable(estimate)")


@pytest.mark.parametrize("name", ["tape", "units", "errors", "workload", "device", "report", "options", "cli"])
def test_no_torch(name):
    python(f"import sys, fxmem.{name}; assert 'torch' not in sys.modules")
