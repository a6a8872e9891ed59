"""Order of results and copies of convolutions; the expected lists were measured on the phantom device."""

from __future__ import annotations

import pytest

from fxmem.kernels.convolution import convolution_steps
from fxmem.kernels.copies import dense
from fxmem.kernels.steps import Drop, Out, Take, Target
from fxmem.tape import Op, Phase, Ref, Role, TensorMeta

H200 = Target(sm=90, sm_count=132)
T4 = Target(sm=75, sm_count=40)


def meta(shape, dtype="float32", *, nhwc=False):
    return dense(TensorMeta(0, shape, (0,) * len(shape), dtype), nhwc=nhwc)


def convolution(x, weight, result, *, padding=(1, 1), groups=1, mask=None):
    """A call with stride and dilation one; with a mask, its backward pass."""
    rest = ((1, 1), padding, (1, 1), False, (0, 0), groups)
    common = {"step": 1, "module": "", "source": "", "start": 0, "stop": 0}
    if mask is None:
        return Op(
            name="convolution.default", phase=Phase.FORWARD, inputs=(x, weight), outputs=(result,),
            args=(Ref(0), Ref(1), None, *rest), **common,
        )  # fmt: skip
    bias = meta((weight.shape[0],), x.dtype)
    outputs = tuple(t for t, asked in zip((x, weight, bias), mask, strict=True) if asked)
    return Op(
        name="convolution_backward.default", phase=Phase.BACKWARD, inputs=(result, x, weight), outputs=outputs,
        args=(Ref(0), Ref(1), Ref(2), (weight.shape[0],), *rest, mask), **common,
    )  # fmt: skip


def sizes(steps):
    """Positions of results as they are, bytes taken as positive and given back as negative numbers."""
    held, found = {}, []
    for step in steps:
        match step:
            case Out(position):
                found.append(f"out {position}")
            case Take(key, nbytes) if not step.keep:
                held[key] = nbytes
                found.append(nbytes)
            case Drop(key):
                found.append(-held.pop(key))
    return found


X, WEIGHT, Y = (5, 24, 17, 19), (48, 24, 3, 3), (5, 48, 17, 19)


def test_dense_operands_take_nothing_more():
    assert sizes(convolution_steps(convolution(meta(X), meta(WEIGHT), meta(Y)), H200)) == ["out 0"]


def test_channels_last_input_makes_the_weight_so():
    op = convolution(meta(X, nhwc=True), meta(WEIGHT), meta(Y))
    assert sizes(convolution_steps(op, H200)) == ["out 0", 41472, -41472]


def test_channels_last_weight_makes_the_input_so():
    op = convolution(meta(X), meta(WEIGHT, nhwc=True), meta(Y))
    assert sizes(convolution_steps(op, H200)) == [155040, "out 0"]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ((True, True, True), ["out 0", "out 1", "out 2"]),
        ((False, True, True), ["out 0", "out 1"]),
        ((True, False, True), ["out 0", "out 1"]),
    ],
)
def test_backward_counts_only_the_results_asked_for(mask, expected):
    op = convolution(meta(X), meta(WEIGHT), meta(Y), mask=mask)
    assert sizes(convolution_steps(op, H200)) == expected


def test_backward_brings_the_gradient_into_the_input_s_format():
    op = convolution(meta(X, nhwc=True), meta(WEIGHT, nhwc=True), meta(Y), mask=(True, True, False))
    assert sizes(convolution_steps(op, H200)) == [310080, "out 0", "out 1", -310080]


def test_depthwise_weight_gradient_comes_first():
    op = convolution(meta(X), meta((24, 1, 3, 3)), meta(X), groups=24, mask=(True, True, True))
    assert sizes(convolution_steps(op, H200)) == ["out 1", "out 0", "out 2"]


def test_workspaces_follow_their_products():
    op = convolution(meta(X), meta(WEIGHT), meta(Y), mask=(True, True, False))
    given = [[Take(f"w{i}", 100 + i, Role.WORKSPACE), Drop(f"w{i}")] for i in range(2)]
    assert sizes(convolution_steps(op, H200, given)) == ["out 0", 100, -100, "out 1", 101, -101]


def test_bfloat16_before_ampere_takes_columns():
    x, weight, y = meta(X, "bfloat16"), meta(WEIGHT, "bfloat16"), meta(Y, "bfloat16")
    assert sizes(convolution_steps(convolution(x, weight, y), T4)) == ["out 0", 139536]
    backward = convolution(x, weight, y, mask=(True, True, True))
    assert sizes(convolution_steps(backward, T4)) == ["out 0", 139536, "out 2", "out 1"]
