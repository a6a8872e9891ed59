"""The self-check: a real run on the CPU beside the tape, and that a wrong tape is found."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from click.testing import CliRunner

from fxmem import verify as module
from fxmem.cli import main
from fxmem.errors import FxmemError, UsageError
from fxmem.verify import verify
from fxmem.workload import Mode, Workload

MODEL = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten())
        self.head = nn.Linear(8 * 14 * 14, 10)
    def forward(self, x):
        return self.head(self.body(x) * 2)
def inputs(batch):
    return torch.zeros(batch, 3, 16, 16)
"""


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


@pytest.mark.parametrize("mode", [Mode.INFERENCE, Mode.TRAINING])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd-momentum"])
def test_same(target, mode, optimizer):
    found = verify(target, Workload(mode=mode, batch=3, optimizer=optimizer))
    assert found.same, found
    assert found.compared == found.predicted > 5


def changed(change):
    made = module._tape

    def tape(target, workload):
        return change(made(target, workload))

    return tape


def without_a_birth(tape):
    """The linear layer's result is forgotten."""
    gone = next(i for i, s in enumerate(tape.storages) if s.shape == (3, 10))
    storages = (*tape.storages[:gone], replace(tape.storages[gone], nbytes=120 + 512), *tape.storages[gone + 1 :])
    return replace(tape, storages=storages)


def with_a_late_death(tape):
    at = next(i for i, e in enumerate(tape.events) if e < 0 and tape.storages[~e].nbytes > 1000)
    events = (*tape.events[:at], *tape.events[at + 1 :], tape.events[at])
    ops = tuple(
        replace(op, start=op.start - (op.start > at), stop=op.stop - (op.stop > at)) for op in tape.ops
    )  # fmt: skip
    starts = tuple(start - (start > at) for start in tape.step_starts)
    return replace(tape, events=events, ops=ops, step_starts=starts)


def test_a_missing_size_is_found(target, monkeypatch):
    monkeypatch.setattr(module, "_tape", changed(without_a_birth))
    found = verify(target, Workload(batch=3))
    assert not found.same
    assert [group.nbytes for group in found.missing] == [632]


def test_a_wrong_death_is_found(target, monkeypatch):
    monkeypatch.setattr(module, "_tape", changed(with_a_late_death))
    found = verify(target, Workload(batch=3))
    assert not found.same
    assert len(found.shorter) == 1


def test_amp_is_refused(target):
    with pytest.raises(UsageError, match="--amp"):
        verify(target, Workload(amp="bfloat16"))


def test_a_model_that_needs_cuda(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL.replace("self.body(x) * 2", "self.body(x) * torch.ones(1, device='cuda')"))
    with pytest.raises(FxmemError):
        verify(str(path), Workload(batch=3))


def test_command(target):
    result = CliRunner().invoke(main, ["verify", target, "--batch", "2", "--format", "json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["same"]
    result = CliRunner().invoke(main, ["verify", target, "--batch", "2"])
    assert "the tape is what ran" in result.stdout


def test_command_says_what_differs(target, monkeypatch):
    monkeypatch.setattr(module, "_tape", changed(without_a_birth))
    result = CliRunner().invoke(main, ["verify", target, "--batch", "3"])
    assert result.exit_code == 1
    assert "Only on the tape" in result.stdout


def test_the_profilers_own_lines_are_kept_off(target, capfd):
    verify(target, Workload(batch=2))
    os.write(2, b"stderr is back")
    assert capfd.readouterr().err == "stderr is back"
