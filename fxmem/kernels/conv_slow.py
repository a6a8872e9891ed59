"""Convolutions that neither cuDNN nor the depthwise kernels take: columns and a matrix product per sample.

That is bfloat16 before Ampere. Mirrors aten/src/ATen/native/cuda/ConvolutionMM2d.cu of torch 2.14;
dilated, transposed, grouped and 3-D ones (``slow_conv_dilated2d`` and so on) are taken as if they
needed no columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxmem.kernels.copies import copy
from fxmem.kernels.gemm import cublas_workspace
from fxmem.kernels.steps import Out, Step, Take, Target, itemsize, nbytes
from fxmem.tape import Op, TensorMeta


def slow_forward(op: Op, x: TensorMeta, weight: TensorMeta, target: Target) -> list[Step]:
    """``slow_conv2d_forward_out_cuda``.

    Args:
        op: The call.
        x: The input, dense.
        weight: The weight.
        target: The GPU.
    """
    if not _plain(op, weight, 3):
        return [Out(0)]
    steps = [*copy("weight", weight), Out(0)]
    if _needs_columns(op, weight):
        steps.append(Take("columns", _columns(weight, op.outputs[0])))
    return [*steps, cublas_workspace(target)]


def slow_backward(
    op: Op, operands: Sequence[TensorMeta], mask: Sequence[bool], bias: Sequence[Step], target: Target
) -> list[Step]:
    """``slow_conv2d_backward_cuda``: the bias's gradient lies between those of input and weight.

    Args:
        op: The call.
        operands: Input, weight and gradient of the output.
        mask: Which of the three gradients are asked for.
        bias: The steps of the bias's gradient.
        target: The GPU.
    """
    x, weight, grad = operands
    data, filters = Out(0), Out(int(mask[0]))
    if not _plain(op, weight, 4):
        return [*([data] if mask[0] else []), *([filters] if mask[1] else []), *bias]
    steps = copy("x", x) + copy("weight", weight) + copy("grad", grad)
    columns: list[Step] = [Take("columns", _columns(weight, grad))]
    if mask[0]:
        steps += [data, *columns]
    steps += bias
    if mask[1]:
        steps.append(filters)
        if not mask[0]:
            steps += columns
    return [*steps, cublas_workspace(target)]


def _plain(op: Op, weight: TensorMeta, at: int) -> bool:
    """Whether this is a 2-D convolution without dilation, transposition and groups."""
    dilation, transposed, groups = op.args[at + 2], op.args[at + 3], op.args[at + 5]
    assert isinstance(dilation, Sequence)
    return len(weight.shape) == 4 and set(dilation) == {1} and not transposed and groups == 1


def _needs_columns(op: Op, weight: TensorMeta) -> bool:
    """``requires_columns``: not for a pointwise convolution, which reads the input as it is."""
    stride, padding = op.args[3], op.args[4]
    assert isinstance(stride, Sequence)
    assert isinstance(padding, Sequence)
    return {*weight.shape[2:], *stride} != {1} or set(padding) != {0}


def _columns(weight: TensorMeta, result: TensorMeta) -> int:
    """Bytes of one sample's columns."""
    row = nbytes(weight) // (weight.shape[0] * itemsize(weight.dtype))
    pixels = 1
    for n in result.shape[2:]:
        pixels *= n
    return row * pixels * itemsize(weight.dtype)
