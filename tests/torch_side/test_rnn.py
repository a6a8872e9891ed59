"""Recurrent layers under the CUDA personality: cuDNN's operators, packed weights, packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from fxmem.cuda import personality
from fxmem.device import find_device
from fxmem.kernels import Target, expand
from fxmem.kernels.rnn import LSTM, UNCONFIRMED, Rnn
from fxmem.recording.notes import to_tape
from fxmem.recording.recorder import Recorder
from fxmem.tape import Phase, Role, Tape

TARGET = Target(sm=90, sm_count=132)
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def traced(run: Callable[[], object]) -> Tape:
    gpu = find_device("h200")
    recorder = Recorder(FakeTensorMode(allow_non_fake_inputs=True))
    recorder.phase = Phase.FORWARD
    with personality(recorder, gpu), recorder:
        recorder.begin_step(1)
        run()
        recorder.end_steps()
    return expand(to_tape(recorder, batch=1, training=True, modules=()), TARGET)


def sizes(tape: Tape, name: str) -> list[int]:
    """Bytes taken (positive) and given back (negative) within the calls of ``name``."""
    events = [e for op in tape.ops if op.name == name for e in tape.events[op.start : op.stop]]
    return [tape.storages[e].nbytes if e >= 0 else -tape.storages[~e].nbytes for e in events]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_one_call_of_cudnn(kind, bias):
    def run() -> None:
        m = KINDS[kind](96, 64, 2, bias=bias, bidirectional=True).cuda()
        m(torch.empty(33, 5, 96, device="cuda", requires_grad=True))[0].sum().backward()

    called = [op.name for op in traced(run).ops if "rnn" in op.name]
    assert called == ["_cudnn_rnn.default", "_cudnn_rnn_backward.default"]


def test_a_forward_call_takes_results_workspace_and_reserve_space_in_this_order():
    def run() -> None:
        m = nn.LSTM(96, 128, 2).cuda()
        m(torch.empty(33, 5, 96, device="cuda"))

    rnn = Rnn(mode=LSTM, input_size=96, hidden_size=128, proj_size=0, layers=2, directions=1)
    workspace, reserve = rnn.workspace_bytes(33, 5, "float32"), rnn.reserve_bytes(33, 5, "float32")
    assert sizes(traced(run), "_cudnn_rnn.default") == [84480, 5120, 5120, workspace, reserve, -workspace]


def test_moving_a_layer_packs_its_parameters():
    def run() -> None:
        m = nn.GRU(96, 128, 2).cuda()
        assert len({p.untyped_storage()._cdata for p in m.parameters()}) == 1

    tape = traced(run)
    flat = next(s for s in tape.storages if s.name == "flat_weights")
    assert flat.role is Role.PARAMETER
    assert flat.nbytes == 743424


def test_bfloat16_weights_stay_scattered():
    def run() -> None:
        nn.GRU(96, 128, 2).to("cuda", torch.bfloat16)

    assert all(s.name != "flat_weights" for s in traced(run).storages)


def test_the_gradients_are_views_of_one_buffer():
    def run() -> None:
        m = nn.LSTM(96, 64).cuda()
        m(torch.empty(33, 5, 96, device="cuda"))[0].sum().backward()
        assert len({p.grad.untyped_storage()._cdata for p in m.parameters()}) == 1

    traced(run)


def test_autocast_casts_all_weights_into_a_new_buffer():
    def run() -> None:
        m = nn.LSTM(96, 64).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y, _ = m(torch.empty(33, 5, 96, device="cuda"))
        assert y.dtype is torch.float16  # whatever autocast's type: AutocastRNN.cpp

    assert any(op.name == "_cudnn_rnn.default" for op in traced(run).ops)


def test_dropout_state_is_made_once_and_kept():
    def run() -> None:
        m = nn.LSTM(96, 64, 2, dropout=0.1).cuda()
        for _ in range(2):
            m(torch.empty(33, 5, 96, device="cuda"))

    tape = traced(run)
    found = [i for i, s in enumerate(tape.storages) if s.name == "cudnn dropout state"]
    assert len(found) == 1
    assert tape.storages[found[0]].role is Role.WORKSPACE
    assert ~found[0] not in tape.events


@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_sequences_follow_their_lengths(batch_first):
    lengths = [7, 33, 1, 30]

    def run() -> None:
        m = nn.LSTM(96, 64, batch_first=batch_first).cuda()
        shape = (4, 33, 96) if batch_first else (33, 4, 96)
        x = torch.empty(shape, device="cuda", requires_grad=True)
        packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=batch_first, enforce_sorted=False)
        assert packed.data.shape[0] == sum(lengths)
        y, found = pad_packed_sequence(m(packed)[0], batch_first=batch_first)
        assert found.tolist() == lengths
        assert y.shape[:2] == ((4, 33) if batch_first else (33, 4))
        y.sum().backward()
        assert x.grad is not None

    assert any(op.name == "_cudnn_rnn_backward.default" for op in traced(run).ops)


def test_reports_say_that_cudnn_has_not_confirmed_the_sizes():
    tape = traced(lambda: nn.GRU(96, 64).cuda()(torch.empty(33, 5, 96, device="cuda")))
    assert UNCONFIRMED in tape.notes


def test_layers_on_the_host_are_left_alone():
    tape = traced(lambda: nn.LSTM(6, 4)(torch.empty(3, 5, 6)))
    assert not tape.events
    assert all(op.name != "_cudnn_rnn.default" for op in tape.ops)


@pytest.mark.parametrize(
    ("cell", "name"), [(nn.LSTMCell, "_thnn_fused_lstm_cell"), (nn.GRUCell, "_thnn_fused_gru_cell")]
)
def test_cells_are_fused(cell, name):
    def run() -> None:
        m = cell(96, 64).cuda()
        h = m(torch.empty(5, 96, device="cuda"))
        (h[0] if isinstance(h, tuple) else h).sum().backward()
        assert all(p.grad is not None for p in m.parameters())

    assert any(op.name == f"{name}.default" for op in traced(run).ops)


@pytest.mark.parametrize("biases", [True, False])
@pytest.mark.parametrize("proj", [0, 3])
def test_places_fill_the_buffer_without_overlap(proj, biases):
    rnn = Rnn(mode=LSTM, input_size=7, hidden_size=5, proj_size=proj, layers=3, directions=2)
    places = sorted((at, at + torch.Size(shape).numel()) for at, shape in rnn.places(biases=biases))
    assert places[0][0] == 0
    assert all(before[1] <= after[0] for before, after in pairwise(places))
    assert places[-1][1] <= rnn.elements
    if biases:
        assert sum(end - start for start, end in places) == rnn.elements
