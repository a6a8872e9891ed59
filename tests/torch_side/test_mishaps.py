"""What users get wrong, end to end: one message that says where, what and what next."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from fxmem import api
from fxmem.errors import FxmemError, SourceError, TraceError, UsageError
from fxmem.workload import InputSpec, Mode, Workload

LINEAR = "import torch\nfrom torch import nn\ndef model(): return nn.Linear(8, 8)\n"
INPUTS = "def inputs(batch): return torch.randn(batch, 8)\n"


def fxmem(path, text, *words):
    (path / "model.py").write_text(text)
    command = [sys.executable, "-m", "fxmem", "estimate", "model.py", *words]
    return subprocess.run(command, cwd=path, capture_output=True, text=True, check=False, env=os.environ)


class Gives(nn.Module):
    """Gives whatever it is told to give."""

    def __init__(self, give):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.give = give

    def forward(self, x):
        return self.give(self.linear(x))


def train(module, **options):
    return api.estimate(module, lambda b: torch.zeros(b, 8), mode=Mode.TRAINING, batch=2, law=False, **options)


@pytest.mark.parametrize("give", [lambda y: None, lambda y: "text", lambda y: {"ids": y.argmax(1)}, lambda y: ()])
def test_an_output_without_a_loss(give):
    with pytest.raises(TraceError, match=r"no loss that is known\n  next: define loss"):
        train(Gives(give))


@pytest.mark.parametrize("loss", [lambda y: None, lambda y: y])
def test_a_loss_that_is_none(loss):
    with pytest.raises(TraceError, match=r"loss\(output\) returned .*\n  next: return a scalar"):
        train(nn.Linear(8, 8), loss=loss)


def test_no_parameters():
    with pytest.raises(UsageError, match="no parameters to train"):
        train(nn.ReLU())


def test_all_frozen():
    module = nn.Linear(8, 8).requires_grad_(False)
    with pytest.raises(FxmemError, match="next: nothing that the loss depends on is trained"):
        train(module)


def test_mode_by_name():
    assert Workload(mode="training").mode is Mode.TRAINING
    with pytest.raises(UsageError, match="--mode dreaming is unknown"):
        Workload(mode="dreaming")


def test_scaler_refuses_half_gradients():
    with pytest.raises(UsageError, match="leave out --dtype"):
        Workload(mode=Mode.TRAINING, dtype="float16", amp="float16")


def test_what_others_hold_is_not_there():
    options = {"inputs": lambda b: torch.zeros(b, 8), "device": "64MiB"}
    assert api.estimate(nn.Linear(8, 8), **options).fits
    assert api.estimate(nn.Linear(8, 8), **options, reserve_bytes=60 << 20).fits is False
    with pytest.raises(UsageError):
        api.estimate(nn.Linear(8, 8), **options, reserve_bytes=-1)


def test_random_inputs_are_the_same_in_every_run():
    class Reads(nn.Module):
        def forward(self, x):
            return x[:, :1].repeat(1, int(x.abs().max().item() * 1000))

    before = torch.get_rng_state()
    answers = {
        api.estimate(Reads(), lambda b: torch.randn(b, 8), batch=2, law=False).peak.requested_bytes for _ in range(3)
    }
    assert len(answers) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_wrappers_are_named():
    answer = api.estimate(nn.DataParallel(nn.Linear(8, 8)), lambda b: torch.zeros(b, 8), law=False)
    assert any("DataParallel" in text for text in answer.coverage.unmodelled)
    compiled = api.estimate(torch.compile(nn.Linear(8, 8)), lambda b: torch.zeros(b, 8), law=False)
    assert any("torch.compile" in text for text in compiled.coverage.unmodelled)


@pytest.mark.slow
def test_a_wrong_shape_is_one_message(tmp_path):
    done = fxmem(tmp_path, LINEAR + "def inputs(batch): return torch.randn(batch, 7)\n")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.slow
def test_stdout_is_the_report_alone(tmp_path):
    noise = "import os\nos.write(1, b'raw')\nos.system('echo shell')\n"
    done = fxmem(tmp_path, noise + LINEAR + INPUTS, "--format", "json")
    assert json.loads(done.stdout)["schema"] == 1
    assert "raw" in done.stderr
    assert "shell" in done.stderr


@pytest.mark.slow
def test_check_leaves_the_reserve(tmp_path):
    words = ("--device", "64MiB", "--check")
    assert fxmem(tmp_path, LINEAR + INPUTS, *words).returncode == 0
    assert fxmem(tmp_path, LINEAR + INPUTS, *words, "--reserve", "60MiB").returncode == 3


DICT = """import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, batch):
        return self.linear(batch["x"])
def model(): return Net()
"""


def test_a_dict_is_the_keywords(tmp_path):
    target = tmp_path / "net.py"
    target.write_text(DICT + "def inputs(batch): return {'x': torch.zeros(batch, 8)}\n")
    with pytest.raises(TraceError, match="unexpected keyword argument 'x'") as caught:
        api.estimate(str(target))
    assert f"inputs(batch) in {target}" in caught.value.hint
    assert "model.py" not in caught.value.hint
    assert "return ({...},)" in caught.value.hint
    target.write_text(DICT + "def inputs(batch): return ({'x': torch.zeros(batch, 8)},)\n")
    assert api.estimate(str(target), law=False).peak.allocated_bytes


class Pair(nn.Module):
    def forward(self, output, target):
        return (output - target).mean()


@pytest.mark.parametrize("loss", [lambda output, target: output.mean(), Pair(), lambda: torch.zeros(())])
def test_a_loss_takes_the_output_alone(loss):
    with pytest.raises(SourceError, match=r"with the model's output alone\n  next: write it as loss\(output\)"):
        train(nn.Linear(8, 8), loss=loss)
    api.estimate(nn.Linear(8, 8), lambda b: torch.zeros(b, 8), law=False, loss=loss)  # not called in inference


def noted(target, inputs=None, **options):
    return [note for note in api.estimate(target, inputs, law=False, **options).coverage.notes if "nothing" in note]


def test_sizes_that_the_inputs_do_not_take_are_noted():
    def of_seq(batch, seq=4):
        return torch.zeros(batch, seq, 8)

    nothing = "changes nothing: inputs(batch) does not take"
    assert noted(nn.Linear(8, 8), lambda b: torch.zeros(b, 8), seq=7, image=64) == [
        f"--seq 7 {nothing} seq", f"--image 64 {nothing} image"
    ]  # fmt: skip
    assert noted(nn.Linear(8, 8), of_seq, seq=7, image=64) == [f"--image 64 {nothing} image"]
    assert noted(nn.Linear(8, 8), of_seq) == []
    given = (InputSpec(None, (8,), None),)
    workload = Workload(inputs=given, seq=7)
    assert noted(nn.Linear(8, 8), workload=workload) == ["--seq 7 changes nothing: the shapes are those of --input"]


def test_sizes_that_a_known_family_does_not_take_are_noted():
    pytest.importorskip("torchvision")
    name = "torchvision:mobilenet_v3_small"
    assert noted(name, image=64) == []
    assert noted(name, seq=7) == [f"--seq 7 changes nothing: the inputs of {name} do not have it"]
