"""A recording beside the tape, on hand-made ones."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from click.testing import CliRunner
from recordings import LINE, event, events_of, snapshot
from tapes import mlp

from fxmem.cli import main
from fxmem.compare import compare
from fxmem.matching import matched
from fxmem.report import FORMATS, render_diff
from fxmem.snapshot import parse

OTHER = {"name": "hook", "filename": "/home/me/hooks.py", "line": 3}


def planted(tape, *, at, nbytes=48, dies=None):
    """The history with one more allocation before event ``at``."""
    history = events_of(tape)
    if dies is not None:
        history.insert(dies, event("free_requested", 10**6, nbytes))
    history.insert(at, event("alloc", 10**6, nbytes, OTHER))
    return compare(tape, parse(snapshot(history)))


def test_the_same():
    tape = mlp(4, steps=3)
    found = compare(tape, parse(snapshot(events_of(tape))))
    assert found.same
    assert (found.first, found.extra, found.missing, found.longer, found.shorter) == (None, (), (), (), ())
    assert found.recorded_peak_bytes == found.predicted_peak_bytes
    assert found.start == "the model's move to the device"
    assert all(point.recorded_bytes == point.predicted_bytes for point in found.curve)


def test_frees_in_a_row_commute():
    tape = mlp(4)
    history = events_of(tape)
    at = next(
        i for i in range(len(history)) if all(e["action"].startswith("free") for e in history[i : i + 4])
    )  # fmt: skip
    history[at : at + 4] = history[at + 2 : at + 4] + history[at : at + 2]
    assert compare(tape, parse(snapshot(history))).same


def test_an_extra_tensor_is_found_with_size_and_line():
    tape = mlp(4)
    found = planted(tape, at=9)
    assert not found.same
    (group,) = found.extra
    assert (group.count, group.nbytes, group.line, group.peak_bytes) == (1, 48, "/home/me/hooks.py:3", 48)
    assert found.first.recorded == "48 bytes at /home/me/hooks.py:3"
    assert found.recorded_peak_bytes == found.predicted_peak_bytes + 48
    assert (found.missing, found.longer, found.shorter) == ((), (), ())


@pytest.mark.parametrize("at", range(4, 20))
def test_it_is_found_among_equals(at):
    tape = mlp(4, width=4)  # most tensors have 64 bytes
    found = planted(tape, at=at, nbytes=64)
    assert sum(group.count for group in found.extra) == 1
    assert not found.missing


def test_missing():
    tape = mlp(4)
    history = events_of(tape)
    gone = next(e for e in history if e["size"] == 64)
    history = [e for e in history if e["addr"] != gone["addr"]]
    (group,) = compare(tape, parse(snapshot(history))).missing
    assert (group.nbytes, group.what) == (64, "scratch1 workspace" if "scratch" in group.what else group.what)
    assert group.count == 1


def test_a_tensor_that_lives_longer():
    tape = mlp(4, steps=3)
    history = events_of(tape)
    outputs = [e for e in history if e["action"] == "free_requested" and e["size"] == 64]
    history = [e for e in history if e is not outputs[-1]]
    found = compare(tape, parse(snapshot(history)))
    assert not found.same
    assert [group.count for group in found.longer] == [1]
    assert "lives on" in found.first.recorded
    assert "is freed" in found.first.predicted
    assert found.shorter == found.extra == found.missing == ()


@pytest.mark.parametrize(("step", "name"), [(2, "step 2"), (3, "step 3")])
def test_a_recording_of_the_steady_state(step, name):
    tape = mlp(4, steps=3)
    start = tape.step_starts[step - 1]
    alive = {e for e in tape.events if e >= 0 and ~e not in tape.events}
    older = {512 * e: tape.storages[e].nbytes for e in alive if e in tape.events[:start]}
    found = compare(tape, parse(snapshot(events_of(tape, start), older)))
    assert found.start == name
    assert found.same
    assert found.before_recorded_bytes == found.before_predicted_bytes > 0


def test_what_was_there_before_counts():
    tape = mlp(4, steps=3)
    start = tape.step_starts[2]
    alive = {e for e in tape.events if e >= 0 and ~e not in tape.events and e in tape.events[:start]}
    older = {512 * e: tape.storages[e].nbytes for e in alive} | {10**6: 1000}
    found = compare(tape, parse(snapshot(events_of(tape, start), older)))
    assert not found.same
    assert found.before_recorded_bytes == found.before_predicted_bytes + 1000
    assert found.notes


def test_more_steps_than_the_tape_has():
    found = compare(mlp(4, steps=3), parse(snapshot(events_of(mlp(4, steps=7)))))
    assert found.same
    assert found.recorded == found.predicted


def test_entirely_different():
    history = [event("alloc", 512 * i, 1000 + i, LINE) for i in range(2000)]
    found = compare(mlp(4), parse(snapshot(history)))
    assert (found.same, found.compared) == (False, 0)
    assert len(found.extra) == 2000


def test_many_differences_end_soon():
    a = [i * 7919 % 64 for i in range(4000)]
    b = [i * 104729 % 61 for i in range(4000)]
    pairs = matched(a, b)
    assert all(a[i] == b[j] for i, j in pairs)
    assert pairs == sorted(pairs)


@pytest.mark.parametrize("name", FORMATS)
def test_reports(golden, name):
    report = planted(mlp(4), at=9).to_dict("model.py", "run.pickle")
    golden(f"diff.{name}.txt", render_diff(report, name) + "\n")


def test_command(tmp_path, monkeypatch):
    from fxmem.snapshot import pickle

    tape = mlp(4)
    fake = ModuleType("fxmem.api")
    fake.trace = lambda target, **given: SimpleNamespace(tape=tape)
    monkeypatch.setitem(sys.modules, "fxmem.api", fake)
    monkeypatch.setattr("fxmem.api", fake, raising=False)
    path = tmp_path / "run.pickle"
    path.write_bytes(pickle.dumps(snapshot(events_of(tape))))
    result = CliRunner().invoke(main, ["diff", "model.py", str(path), "--format", "json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["schema"], report["same"], report["target"]) == (1, True, "model.py")
