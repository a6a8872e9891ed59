"""Programs that leave the usual path: gradients inside a forward pass, saved tensors on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional

from fxmem import api
from fxmem.tape import Phase, Role, Tape
from fxmem.workload import ConvWorkspace, Mode

PENALTY = str(Path(__file__).parents[1] / "cases" / "gradient_penalty.py")
TRAINING = {"mode": Mode.TRAINING, "optimizer": "none", "steps": 1, "batch": 4}


def traced(module, shape=(8,), **options) -> Tape:
    return api.trace(module, lambda b: torch.zeros(b, *shape), **options).tape


def test_a_gradient_taken_in_a_forward_pass_is_made_by_the_engines_thread():
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(self.inner(x).sum(), x)[0]

    tape = traced(Forces(), batch=4, steps=1)
    products = [op for op in tape.ops if op.name in ("addmm.default", "mm.default")]
    assert [(op.phase, op.thread) for op in products] == [(Phase.FORWARD, "main"), (Phase.FORWARD, "autograd")]
    workspaces = [s for s in tape.storages if s.role is Role.WORKSPACE]
    assert len(workspaces) == 2, "each thread has a handle of cuBLAS of its own"


@pytest.mark.parametrize("pin_memory", [False, True])
def test_tensors_saved_on_the_host_leave_the_device_until_the_backward_pass(pin_memory):
    class Offloading(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            with save_on_cpu(pin_memory=pin_memory):
                return self.inner(x).sin()

    tape = traced(Offloading(), **TRAINING)
    (product,) = (op for op in tape.ops if op.name == "addmm.default")
    (cosine,) = (op for op in tape.ops if op.name == "cos.default")
    assert tape.events.index(~product.outputs[0].storage) < cosine.start
    back = cosine.inputs[0].storage
    assert back not in (-1, product.outputs[0].storage)
    assert tape.ops[tape.storages[back].op].phase is Phase.BACKWARD


def born(tape: Tape, op) -> list[int]:
    return [tape.storages[e].nbytes for e in tape.events[op.start : op.stop] if e >= 0]


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_ctc_loss_keeps_a_table_of_paths_and_takes_another_in_the_backward_pass(zero_infinity):
    class Speech(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 10)

        def forward(self, x):
            scores = self.inner(x).transpose(0, 1).log_softmax(-1)
            targets = torch.ones(8, dtype=torch.long, device=x.device)
            lengths = torch.full((4,), 300), torch.tensor([1, 2, 3, 2])
            return functional.ctc_loss(scores, targets, *lengths, zero_infinity=zero_infinity)

    tape = traced(Speech(), (300, 8), **TRAINING, loss=lambda y: y)
    (forward,) = (op for op in tape.ops if op.name == "_ctc_loss.default")
    (backward,) = (op for op in tape.ops if op.name == "_ctc_loss_backward.default")
    table, grad, row = 4 * 300 * (2 * 3 + 1) * 4, 300 * 4 * 10 * 4, 4 * 300 * 4
    assert born(tape, forward) == [32, 32, 32, table, 16]
    sums = [row * 4, row, row, row // 4, row * 4, row]
    last = [4, 4, grad] if zero_infinity else []
    assert born(tape, backward) == [32, 32, 32, table, grad, *sums, *last]


@pytest.mark.parametrize(
    ("loss", "large"),
    [
        (lambda a, b: functional.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"), "masked_fill.Scalar"),
        (functional.binary_cross_entropy_with_logits, "neg.default mul.Tensor"),
    ],
)
def test_a_gradient_of_a_losss_target_is_not_written_in_place(loss, large):
    class Teaching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return loss(self.a(x), self.b(x))

    tape = traced(Teaching(), **TRAINING, loss=lambda y: y)
    ops = [op for op in tape.ops if op.phase is Phase.BACKWARD]
    names = large.split()
    at = next(i for i in range(len(ops)) if [op.name for op in ops[i : i + len(names)]] == names)
    assert [born(tape, op) for op in ops[at : at + len(names)]] == [[4 * 8 * 4]] * len(names)


class Two(nn.Module):
    """Two layers, and what is made of their outputs."""

    def __init__(self, made):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.made = made

    def forward(self, x):
        return self.made(self.a(x), self.b(x))


def backward_of(made, name: str) -> list[list[int]]:
    tape = traced(Two(made), **TRAINING)
    return [born(tape, op) for op in tape.ops if op.phase is Phase.BACKWARD and op.name == name]


@pytest.mark.parametrize(
    ("made", "sizes"),
    [
        (lambda a, b: sum(t.mean() for t in torch.var_mean(a, -1)) + b.mean(), [128]),  # gself + aux
        (lambda a, b: a * a + b, []),  # two gradients meet at `a`: the engine adds in place
    ],
)
def test_sums_in_a_formula_take_memory_where_those_of_the_engine_do_not(made, sizes):
    assert [size for sizes in backward_of(made, "add.Tensor") for size in sizes] == sizes


@pytest.mark.parametrize("made", [torch.maximum, lambda a, b: a.clamp(max=b)])
def test_a_mask_is_filled_into_what_the_formula_made(made):
    assert all(sizes == [] for sizes in backward_of(made, "masked_fill.Scalar"))


def test_distances_within_a_set_take_a_term_for_each_pair():
    tape = traced(Two(lambda a, b: functional.pdist(a) + functional.pdist(b)), **TRAINING)
    terms = [born(tape, op) for op in tape.ops if op.name == "_pdist_backward.default"]
    assert terms == [[4 * 8 * 4, 3 * 4 * 8 * 4]] * 2


def test_a_buffer_that_is_rebound_dies():
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean = self.mean * 0.9
            return x

    tape = traced(Average(), batch=4, steps=1)
    (buffer,) = (i for i, storage in enumerate(tape.storages) if storage.role is Role.BUFFER)
    assert ~buffer in tape.events


@pytest.mark.parametrize(
    ("move", "sizes"),
    [
        (lambda x, host: host.to(x.device), [384]),
        (lambda x, host: host.to(x.device, memory_format=torch.channels_last), [384, 384]),
        (lambda x, host: host.to(x.device, torch.float16), [192]),
        (lambda x, host: host.to(x.device, torch.float16, non_blocking=True), [192, 384]),
        (lambda x, host: x.new_zeros(2, 3, 4, 4).transpose(2, 3).copy_(host), [384]),
        (lambda x, host: x.cpu(), []),
        (lambda x, host: x[:, ::2].cpu(), [4 * 4 * 4]),
        (lambda x, host: x.to("cpu", torch.float64, non_blocking=True), [4 * 8 * 8]),
    ],
)
def test_copies_between_host_and_device_are_staged_where_one_memcpy_does_not_do(move, sizes):
    class Moves(nn.Module):
        def forward(self, x):
            return move(x, torch.zeros(2, 3, 4, 4))

    tape = traced(Moves(), batch=4, steps=1)
    copies = [born(tape, op) for op in tape.ops if op.name in ("_to_copy.default", "copy_.default")]
    assert copies == [sizes]


@pytest.mark.parametrize(("batch", "allocated", "reserved"), [(8, 85907968, 96468992), (20, 110090752, 115343360)])
def test_the_engine_takes_nodes_that_it_made_itself_in_their_turn(batch, allocated, reserved):
    """Measured on the phantom; with the numbers that the CPU gives such nodes, 131,072 bytes are missing at 8."""
    options = {"mode": Mode.TRAINING, "conv_workspace": ConvWorkspace.NONE, "law": False}
    peak = api.estimate(PENALTY, batch=batch, device="h200", **options).peak
    assert (peak.allocated_bytes, peak.reserved_bytes) == (allocated, reserved)
