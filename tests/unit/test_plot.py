"""The plots: letters in the terminal, files by matplotlib."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from budgets import TARGET
from reports import batch_report, curve
from tapes import mlp

from fxmem.allocator_config import AllocatorConfig
from fxmem.curve import PARTS, sample
from fxmem.errors import MissingExtraError, UsageError
from fxmem.law import fit
from fxmem.program import Tapes
from fxmem.report import render_batch
from fxmem.report.plot import curve_rows, draw


def wide(batch):
    return mlp(batch, width=65536)


def test_golden(golden):
    golden("batch_curve.table.txt", render_batch(batch_report(devices=1, curve=curve()), "table") + "\n")


def test_rows():
    rows = curve_rows(batch_report(curve=curve())["devices"][0])
    assert [row[0] for row in rows] == ["1", "32", "64", "96", "115"]
    assert all(row[2].count("|") == 1 for row in rows)
    assert rows[-1][2].count("a") > rows[0][2].count("a")
    assert len({row[2].index("|") for row in rows}) == 1


def test_samples():
    tapes = Tapes(fit([wide(2), wide(3), wide(4)]), 3, TARGET)
    found = sample(tapes, AllocatorConfig(), 40, None)
    assert [found[0].batch, found[-1].batch] == [2, 48] or found[-1].batch == 48
    assert all(set(point.parts) == set(PARTS) for point in found)
    assert found[0].nbytes < found[-1].nbytes
    again = sample(tapes, AllocatorConfig(), 40, 5)
    assert again[0].nbytes == found[0].nbytes + 5


def test_without_a_law_nothing_is_traced_for_a_plot():
    tapes = Tapes(fit([wide(2), wide(3)]), 3, TARGET, trace=wide)
    assert sample(tapes, AllocatorConfig(), 40, None) == ()


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_files(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"a.{suffix}"
    draw(batch_report(curve=curve()), path)
    assert path.stat().st_size > 1000


def test_what_cannot_be_drawn(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="neither"):
        draw(batch_report(curve=curve()), Path("a.jpg"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match="matplotlib"):
        draw(batch_report(curve=curve()), tmp_path / "a.svg")
