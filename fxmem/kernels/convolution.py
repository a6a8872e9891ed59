"""Convolutions: copies that make operands dense, and the order of a backward pass's results."""

from __future__ import annotations

from fxmem.kernels.steps import Op, Out, Rule, Step, Take, Target, contiguous, channels_last, nbytes, suggests_channels_last, tensor
from fxmem.tape import TensorMeta


def _needs_copy(meta: TensorMeta, nhwc: bool) -> bool:
    return not (channels_last(meta) if nhwc else contiguous(meta))


def _backward(op: Op, target: Target) -> list[Step]:
    grad, x, weight = tensor(op, 0), tensor(op, 1), tensor(op, 2)
    assert grad is not None and x is not None and weight is not None
    groups = op.args[9]
    depthwise = isinstance(groups, int) and groups > 1 and groups == x.shape[1]
    if depthwise:
        return [Out(1), Out(0), Out(2)]
    return [Out(0), Out(1), Out(2)]


CONVOLUTION: dict[str, Rule] = {
    "convolution_backward.default": _backward,
}
