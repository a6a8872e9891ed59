"""What programs do beside computing: they check values, keep generators and streams, count, refuse bad input."""

from __future__ import annotations

import textwrap

import pytest
import torch
from torch import nn

from fxmem import api
from fxmem.errors import FxmemError, UsageError
from fxmem.tape import Role
from fxmem.verify import verify
from fxmem.workload import Mode, Workload

HEAD = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)
    def forward(self, x):
        h = self.layer(x)
        {body}
        return h
def model():
    return Net()
def inputs(batch):
    return torch.randn(batch * 300, 64)
"""


@pytest.fixture
def written(tmp_path):
    """A file whose model runs ``body`` between its layer and its result."""

    def write(body: str) -> str:
        path = tmp_path / "model.py"
        path.write_text(HEAD.format(body=textwrap.indent(textwrap.dedent(body), " " * 8).strip()))
        return str(path)

    return write


@pytest.mark.parametrize(
    "body",
    [
        "assert torch.isfinite(h).all(), 'not finite'",
        "if not (h.abs() < 1e9).all():\n    raise ValueError('large')",
        "assert not torch.isnan(h).any()",
        "h = torch.distributions.Normal(h, h.exp()).rsample()",
        "h = h * torch.distributions.Categorical(logits=h).entropy()[:, None]",
        "assert torch.allclose(h, h)",
    ],
)
def test_a_check_of_values_passes(written, body):
    assert api.trace(written(body), batch=8).tape.ops


def test_a_value_that_nothing_depends_on_is_still_read_as_false(written):
    tape = api.trace(written("if (h > 0).all():\n    h = h.repeat(9, 1)"), batch=8).tape
    assert 9 * 8 * 300 * 64 * 4 not in {s.nbytes for s in tape.storages}


def test_a_count_is_as_long_as_its_least_length(written):
    tape = api.trace(written("c = torch.bincount(h.argmax(-1), minlength=70)\nassert len(c) == 70"), batch=8).tape
    assert any("bincount" in note for note in tape.notes)


def test_a_generator_on_the_device_is_one_on_the_host(written):
    body = """
        g = torch.Generator(device=x.device).manual_seed(3)
        assert g.device.type == "cuda" and isinstance(torch.default_generator, torch.Generator)
        h = h + torch.rand(h.shape, generator=g, device=x.device)
    """
    assert api.trace(written(body), batch=8).tape.ops
    assert torch.Generator is type(torch.default_generator), "the stand-in ends with the trace"


def test_a_compiled_function_is_run_as_it_is(written):
    """Its compiler must not start: fake tensors are no work for it."""
    assert any(
        op.name == "sin.default" for op in api.trace(written("h = torch.compile(torch.sin)(h)"), batch=8).tape.ops
    )


def test_streams_of_its_own_are_said(written):
    body = "s = torch.cuda.Stream()\nwith torch.cuda.stream(s):\n    h = h.sin()\nh.record_stream(s)"
    tape = api.trace(written(body), batch=8).tape
    assert any("streams" in line for line in tape.unmodelled)


def test_deterministic_kernels_are_said(written):
    torch.use_deterministic_algorithms(True)
    try:
        tape = api.trace(written("pass"), batch=8).tape
    finally:
        torch.use_deterministic_algorithms(False)
    assert any("deterministic" in line for line in tape.unmodelled)


def test_matrices_of_two_types_are_refused_as_cuda_refuses_them(written):
    with pytest.raises(FxmemError, match="same dtype"):
        api.trace(written("h = self.layer(h.double())"), batch=8)


def test_inputs_that_ignore_the_batch_are_noticed():
    def fixed(batch):
        return torch.zeros(8, 4)

    with pytest.raises(UsageError, match="nothing depends on the batch"):
        api.max_batch(nn.Linear(4, 4), fixed, device="64MiB")
    notes = api.estimate(nn.Linear(4, 4), fixed, batch=2).coverage.notes
    assert any("nothing depends on the batch" in note for note in notes)


def test_a_length_that_is_the_default_is_a_length(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\nmodel = torch.nn.Identity\ndef inputs(batch, seq=512):\n    return torch.zeros(batch, seq)\n"
    )
    for given, wanted in (({}, 512), ({"seq": 128}, 128), ({"seq": 64}, 64), ({"workload": Workload(seq=32)}, 32)):
        tape = api.trace(str(path), **given).tape
        assert next(s.shape for s in tape.storages if s.role is Role.INPUT) == (1, wanted)


def test_recurrent_layers_count():
    flops = api.estimate(
        nn.LSTM(32, 48, num_layers=2), lambda b: torch.zeros(100, b, 32), batch=4, law=False
    ).model.flops
    assert flops == 2 * 100 * 4 * (4 * 48 * (32 + 48) + 4 * 48 * (48 + 48))


def test_a_gradient_of_an_absolute_value_has_one():
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            x = x.requires_grad_()
            (g,) = torch.autograd.grad(self.layer(x.abs()).abs().sum(), x, create_graph=True)
            return g.square().sum()

    tape = api.trace(Penalty(), lambda b: torch.zeros(b * 300, 64), mode=Mode.TRAINING, batch=8, loss=lambda y: y).tape
    assert any(op.name.startswith("_efficientzerotensor") for op in tape.ops)


def test_what_values_select_makes_a_verification_fail(written):
    target = written("rows = (h[:, 0] > 0).nonzero()[:, 0]\nh = h.index_add(0, rows, self.layer(h[rows]))")
    found = verify(target, Workload(batch=2))
    assert not found.same
    assert any("nonzero" in line for line in found.unmodelled)
