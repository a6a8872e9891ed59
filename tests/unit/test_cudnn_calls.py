"""Convolution calls of a tape as questions, and the steps that come of them."""

from __future__ import annotations

import pytest

from fxmem.cudnn import Answer, Direction, Source
from fxmem.kernels.conv_workspace import questions, tape_questions, workspace_steps
from fxmem.kernels.steps import Drop, Take, Target
from fxmem.tape import Op, Phase, Ref, Role, Tape, TensorMeta

H200 = Target(sm=90, sm_count=132)


def meta(shape, dtype="float32", channels_last=False, storage=0):
    order = [0, *range(2, len(shape)), 1] if channels_last else range(len(shape))
    stride, step = [0] * len(shape), 1
    for d in reversed(list(order)):
        stride[d] = step
        step *= shape[d]
    return TensorMeta(storage, tuple(shape), tuple(stride), dtype)


def forward(
    x, w, y, *, stride=1, padding=0, dilation=1, transposed=False, output_padding=0, groups=1, dtype="float32", cl=False
):
    n = len(x) - 2
    args = (
        Ref(0),
        Ref(1),
        None,
        (stride,) * n,
        (padding,) * n,
        (dilation,) * n,
        transposed,
        (output_padding,) * n,
        groups,
    )
    inputs = (meta(x, dtype, cl), meta(w, dtype, cl, 1))
    return Op(
        name="convolution.default", step=1, phase=Phase.FORWARD, module="", source="", start=0, stop=0,
        inputs=inputs, outputs=(meta(y, dtype, cl, 2),), args=args,
    )  # fmt: skip


def backward(x, w, y, mask, **options):
    call = forward(x, w, y, **options)
    args = (Ref(0), Ref(1), Ref(2), None, *call.args[3:], mask)
    return Op(
        name="convolution_backward.default", step=1, phase=Phase.BACKWARD, module="", source="", start=0, stop=0,
        inputs=(*call.outputs, *call.inputs), args=args,
    )  # fmt: skip


def test_forward():
    (question,) = questions(forward((8, 3, 224, 224), (64, 3, 7, 7), (8, 64, 112, 112), stride=2, padding=3), H200)
    assert question.direction is Direction.FORWARD
    assert question.y == (8, 64, 112, 112)
    assert not question.channels_last


def test_backward_asks_for_what_is_wanted():
    shapes = ((8, 64, 56, 56), (64, 64, 1, 1), (8, 64, 56, 56))
    both = questions(backward(*shapes, (True, True, False)), H200)
    assert [q.direction for q in both] == [Direction.DGRAD, Direction.WGRAD]
    assert [q.direction for q in questions(backward(*shapes, (False, True, False)), H200)] == [Direction.WGRAD]


def test_transposed_is_the_other_way_round():
    shapes = ((2, 16, 8, 8), (16, 4, 3, 3), (2, 4, 16, 16))
    options = {"stride": 2, "padding": 1, "output_padding": 1, "transposed": True}
    (question,) = questions(forward(*shapes, **options), H200)
    assert (question.direction, question.x, question.y) == (Direction.DGRAD, (2, 4, 16, 16), (2, 16, 8, 8))
    both = questions(backward(*shapes, (True, True, False), **options), H200)
    assert [q.direction for q in both] == [Direction.FORWARD, Direction.WGRAD]
    assert not questions(forward(*shapes, **{**options, "output_padding": 2}), H200)


def test_one_dimension_is_two():
    (question,) = questions(forward((2, 8, 100), (16, 8, 3), (2, 16, 98)), H200)
    assert (question.x, question.w, question.padding) == ((2, 8, 1, 100), (16, 8, 1, 3), (0, 0))
    assert not question.channels_last


@pytest.mark.parametrize(("dtype", "cl", "sm", "expected"), [
    ("float32", False, 90, False), ("float32", True, 90, True), ("float16", False, 90, True),
    ("bfloat16", False, 90, False), ("bfloat16", True, 90, True),
])  # fmt: skip
def test_depthwise(dtype, cl, sm, expected):
    op = forward((8, 64, 28, 28), (64, 1, 3, 3), (8, 64, 28, 28), padding=1, groups=64, dtype=dtype, cl=cl)
    assert bool(questions(op, Target(sm=sm, sm_count=1))) is expected


@pytest.mark.parametrize(("batch", "channels", "width", "kernel", "stride", "expected"), [
    (8, 64, 28, 3, 1, True), (8, 64, 28, 7, 1, False), (8, 16, 28, 3, 1, False), (8, 64, 6, 3, 1, False),
    (8, 64, 28, 3, 2, False), (8, 256, 28, 3, 2, True), (8, 256, 14, 5, 2, False), (8, 512, 14, 5, 2, True),
    (1, 64, 14, 5, 2, True), (1, 64, 56, 1, 2, False), (8, 128, 7, 1, 2, True), (32, 128, 7, 1, 2, False),
])  # fmt: skip
def test_depthwise_half(batch, channels, width, kernel, stride, expected):
    out = (width + kernel // 2 * 2 - kernel) // stride + 1
    op = forward(
        (batch, channels, width, width), (channels, 1, kernel, kernel), (batch, channels, out, out),
        padding=kernel // 2, stride=stride, groups=channels, dtype="float16",
    )  # fmt: skip
    assert bool(questions(op, H200)) is expected


def test_not_cudnn():
    shapes = ((8, 64, 8, 8), (64, 64, 1, 1), (8, 64, 8, 8))
    assert not questions(forward(*shapes, dtype="bfloat16"), Target(sm=75, sm_count=40))
    assert questions(forward(*shapes, dtype="float64", cl=True), H200)[0].channels_last is False
    assert not questions(forward((0, 64, 8, 8), (64, 64, 1, 1), (0, 64, 8, 8)), H200)
    assert workspace_steps(forward(*shapes, dtype="bfloat16"), Target(sm=75, sm_count=40), lambda q: 1 / 0) == []


def test_steps():
    sizes = {Direction.FORWARD: 7, Direction.DGRAD: 11, Direction.WGRAD: 0}

    def ask(question):
        n = sizes[question.direction]
        return Answer(nbytes=n, low=n, high=n, source=Source.RULE)

    shapes = ((8, 64, 8, 8), (64, 64, 1, 1), (8, 64, 8, 8))
    taken = [[Take("cudnn forward", 7, Role.WORKSPACE), Drop("cudnn forward")]]
    assert workspace_steps(forward(*shapes), H200, ask) == taken
    dgrad = [Take("cudnn dgrad", 11, Role.WORKSPACE), Drop("cudnn dgrad")]
    assert workspace_steps(backward(*shapes, (True, True, True)), H200, ask) == [dgrad, []]
    assert workspace_steps(backward(*shapes, (False, True, False)), H200, ask) == [[]]


def test_tape_asks_each_question_once():
    op = forward((8, 64, 8, 8), (64, 64, 1, 1), (8, 64, 8, 8))
    tape = Tape(batch=8, steps=1, storages=(), ops=(op, op), events=(), step_starts=())
    assert len(tape_questions([tape, tape], H200)) == 1
