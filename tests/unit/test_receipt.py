"""Receipts: parts, residuals, the files."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tapes import mlp

from fxmem import receipt
from fxmem.allocator import AllocatorConfig, replay
from fxmem.errors import FxmemError
from fxmem.report import FORMATS, render_calibration
from fxmem.tape import Role

GPU = {"name": "Phantom H200", "arch": "sm_90", "sm_count": 132, "capacity_bytes": 2**37, "phantom": True}


def estimate(batch=4):
    tape = mlp(batch, steps=3)
    return receipt.estimated(tape, replay(tape, AllocatorConfig()))


def run(parts, *, workspaces=0, context=300, first=0):
    steps = [{"allocated_bytes": parts["first_allocated"] + first}, {"allocated_bytes": parts["later_allocated"]}]
    named = {f"{name}_bytes": parts[name] for name in ("model", "inputs", "left", "allocated", "reserved")}
    return named | {"steps": steps, "workspaces_bytes": parts["workspaces"] + workspaces, "context_bytes": context}


def made(*, workspaces=0, statuses=("measured", "measured", "oom")):
    entries = []
    for batch, status in zip((1, 2, 4), statuses, strict=True):
        parts = estimate(batch)
        answer = {"status": status, "repeats": [run(parts, workspaces=workspaces), run(parts, workspaces=workspaces)]}
        if status != "measured":
            answer = {"status": status, "reason": "CUDA out of memory"}
        entries.append(receipt.entry(batch, answer, parts, receipt.tape_hash(mlp(batch))))
    return {
        "kind": "fxmem receipt", "schema": 1, "fxmem": "0.1.0", "target": "model.py",
        "options": {"mode": "training", "dtype": "float32", "optimizer": "sgd", "amp": None},
        "environment": {"gpu": GPU, "driver": None, "torch": "2.14.1"}, "entries": entries,
        "laws": receipt.laws(entries), "verdict": receipt.verdict(entries),
    }  # fmt: skip


def test_parts():
    tape = mlp(4, steps=3)
    plan = replay(tape, AllocatorConfig())
    found = receipt.estimated(tape, plan)
    assert found["allocated"] == plan.peak_allocated_bytes
    assert found["reserved"] == plan.peak_reserved_bytes
    assert (found["model"], found["inputs"], found["workspaces"]) == (1024, 512, 0)
    assert found["left"] == found["model"] + found["inputs"] + 2 * 512  # momentum and the last output


def test_workspaces_that_stay_are_a_part():
    tape = mlp(4, steps=1)
    last = tape.events[-1]
    storages = list(tape.storages)
    kept = next(e for e in tape.events if e >= 0 and storages[e].role is Role.OUTPUT)
    storages[kept] = replace(storages[kept], role=Role.WORKSPACE)
    tape = replace(tape, storages=tuple(storages))
    assert last < 0
    assert receipt.estimated(tape, replay(tape, AllocatorConfig()))["workspaces"] == 512


def test_exact():
    found = made()
    assert found["verdict"].startswith("exact")
    assert found["laws"]["measured"] == found["laws"]["estimate"]


def test_a_missing_workspace_shows_in_its_part():
    entry = made(workspaces=2**20)["entries"][0]
    assert {name for name, nbytes in entry["residual"].items() if nbytes} == {"workspaces"}
    assert "workspaces" in made(workspaces=2**20)["verdict"]


def test_repeats_are_averaged_and_the_first_step_stands_apart():
    parts = estimate()
    mean = receipt.measured([run(parts, first=512), run(parts)])
    assert mean["first_allocated"] == parts["first_allocated"] + 256
    assert mean["later_allocated"] == parts["later_allocated"]


def test_the_hash_is_of_the_events():
    assert receipt.tape_hash(mlp(4)) == receipt.tape_hash(mlp(4))
    assert receipt.tape_hash(mlp(4)) != receipt.tape_hash(mlp(5))


def test_written_whole_and_read_back(tmp_path):
    path = tmp_path / "new" / "r.json"
    receipt.write(made(), path)
    assert receipt.read(path) == made()
    assert [other.name for other in path.parent.iterdir()] == ["r.json"]


def test_it_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FxmemError, match="cannot write"):
        receipt.write(made(), tmp_path / "file" / "r.json")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "x"}, "does not say"),
        ({"schema": 2}, "schema is 2"),
        ({"target": 3}, "'target'"),
        ({"environment": {}}, "'gpu'"),
        ({"entries": 3}, "no list"),
        ({"entries": [{"batch": 0}]}, "no batch"),
        ({"entries": [{"batch": 1, "estimate": {}}]}, "lacks a part"),
    ],
)
def test_foreign_receipts(tmp_path, change, reason):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(made() | change))
    with pytest.raises(FxmemError, match=reason):
        receipt.read(path)


def test_residuals_must_be_right(tmp_path):
    wrong = copy.deepcopy(made())
    wrong["entries"][0]["residual"]["reserved"] += 512
    path = tmp_path / "r.json"
    path.write_text(json.dumps(wrong))
    with pytest.raises(FxmemError, match="not measurement less estimate"):
        receipt.read(path)


TEXT = json.dumps(made()).encode()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_mutated_receipts(tmp_path_factory, data):
    text = bytearray(TEXT)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=5) | st.just(b"[" * 3000))
    path = tmp_path_factory.getbasetemp() / "mutated.json"
    path.write_bytes(text)
    try:
        render_calibration(receipt.read(path), "json")
    except FxmemError as error:
        assert str(path) in str(error)  # noqa: PT017
    assert path.read_bytes() == text


@pytest.mark.parametrize("name", FORMATS)
def test_reports(golden, name):
    golden(f"calibration.{name}.txt", render_calibration(made(workspaces=2**20), name) + "\n")
