"""Layer, root-mean-square and group normalisation: copies, accumulators, partial sums.

aten/src/ATen/native/cuda/layer_norm_kernel.cu, aten/src/ATen/native/cuda/group_norm_kernel.cu and
aten/src/ATen/native/group_norm.cpp (torch 2.14).
Statistics have CUDA's types by :mod:`fxmem.recording.shapes.norm`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxmem.kernels.reductions import accumulator, device_tensor, reduce_steps, summing
from fxmem.kernels.steps import (
    Drop,
    Out,
    Rule,
    Step,
    Take,
    Target,
    contiguous,
    itemsize,
    launch_scratch,
    nbytes,
    tensor,
)
from fxmem.tape import Op, TensorMeta

_PARALLEL_ROWS = 64 * 1024
_BLOCK_WIDTH = 32
_ROWS_PER_BLOCK = 32
_MAX_BLOCKS = 64 * 1024 // 2


def copy_of(key: str, source: TensorMeta | None) -> tuple[list[Step], list[Step]]:
    """``contiguous()``: what it takes, and its end."""
    if source is None or contiguous(source):
        return [], []
    return [Take(key, nbytes(source))], [Drop(key)]


def gradient(mask: Sequence[object], index: int) -> list[Step]:
    """Result ``index`` of a backward operator, if it is wanted: those that are not are no results."""
    return [Out(sum(map(bool, mask[:index])))] if mask[index] else []


def _shape(op: Op, position: int) -> tuple[int, ...]:
    shape = op.args[position]
    assert isinstance(shape, Sequence)
    return tuple(int(n) for n in shape)


def _layer_norm(op: Op, target: Target) -> list[Step] | None:
    """``layer_norm_cuda`` (layer_norm_kernel.cu): the input made dense, the result, then mean and rstd."""
    x = device_tensor(op, 0)
    if x is None:
        return None
    take, drop = copy_of("input", x)
    return [*take, Out(0), Out(1), Out(2), *drop]


def _rms_norm(op: Op, target: Target) -> list[Step] | None:
    """``_fused_rms_norm_cuda`` (layer_norm_kernel.cu)."""
    x = device_tensor(op, 0)
    if x is None:
        return None
    take, drop = copy_of("input", x)
    return [*take, Out(0), Out(1), *drop]


def _layer_norm_backward(op: Op, target: Target) -> list[Step] | None:
    """``layer_norm_backward_cuda`` (layer_norm_kernel.cu)."""
    weights = (tensor(op, 5), tensor(op, 6))
    return _backward(op, weights, op.args[7], target)


def _rms_norm_backward(op: Op, target: Target) -> list[Step] | None:
    """``_fused_rms_norm_backward_cuda`` (layer_norm_kernel.cu)."""
    return _backward(op, (tensor(op, 4),), op.args[5], target)


def _backward(op: Op, weights: Sequence[TensorMeta | None], mask: object, target: Target) -> list[Step] | None:
    """``LayerNormBackwardKernelImpl``: a gradient that is not dense is copied after the results exist."""
    grad, x = tensor(op, 0), tensor(op, 1)
    if grad is None or x is None or grad.storage < 0:
        return None
    assert isinstance(mask, Sequence)
    columns = math.prod(_shape(op, 2))
    rows = math.prod(x.shape) // max(columns, 1)
    take_x, drop_x = copy_of("input", x)
    take_grad, drop_grad = copy_of("gradient", grad)
    wanted = [(i + 1, w) for i, w in enumerate(weights) if mask[i + 1] and w is not None]
    steps: list[Step] = [*take_x, *gradient(mask, 0)]
    if rows > _PARALLEL_ROWS and columns // _BLOCK_WIDTH < target.sm_count // 2 and wanted:
        steps += [Take(f"parameter {i}", nbytes(w)) for i, w in wanted]
        return [*steps, *take_grad, *_partial_sums(wanted, mask, (rows, columns), target), *drop_grad, *drop_x]
    results = [step for i in range(1, len(mask)) for step in gradient(mask, i)]
    return [*steps, *results, *take_grad, *drop_grad, *drop_x]


def _partial_sums(
    wanted: list[tuple[int, TensorMeta]], mask: Sequence[object], size: tuple[int, int], target: Target
) -> list[Step]:
    """``LaunchGammaBetaBackwardCUDAKernel``: rows in parallel, then ``sum(0)`` replaces the first result."""
    rows, columns = size
    across = -(-columns // _BLOCK_WIDTH)
    blocks = min(_MAX_BLOCKS // across, -(-rows // _ROWS_PER_BLOCK))
    width = wanted[0][1].shape[-1]
    steps: list[Step] = [launch_scratch(f"blocks {i}", blocks * width * itemsize(w.dtype)) for i, w in wanted]
    for i, weight in wanted:
        partial = TensorMeta(-1, (blocks, width), (width, 1), weight.dtype)
        total = TensorMeta(-1, (width,), (1,), weight.dtype)
        steps += [*gradient(mask, i), *reduce_steps(partial, (total,), (0,), summing, target), Drop(f"parameter {i}")]
    return [*steps, *(Drop(f"blocks {i}") for i, _ in reversed(wanted))]


def _group_norm(op: Op, target: Target) -> list[Step] | None:
    """``native_group_norm`` (group_norm.cpp) and ``GroupNormKernelImplInternal`` (group_norm_kernel.cu)."""
    x, gamma, beta = tensor(op, 0), tensor(op, 1), tensor(op, 2)
    n, c, inner, groups = (_int(op, i) for i in range(3, 7))
    if x is None or x.storage < 0 or not n * c * inner:
        return None
    size = itemsize(accumulator(x.dtype))
    take, drop = copy_of("input", x)
    steps: list[Step] = [Out(0), Out(1), Out(2), *take]
    if accumulator(x.dtype) != x.dtype:
        steps += [Take("mean", n * groups * size), Take("rstd", n * groups * size)]
    if inner != 1 and (gamma is not None or beta is not None):
        steps += [Take("scale", n * c * size), Take("shift", n * c * size), Drop("shift"), Drop("scale")]
    return [*steps, Drop("rstd"), Drop("mean"), *drop]


def _group_norm_backward(op: Op, target: Target) -> list[Step] | None:
    """``native_group_norm_backward``, ``GroupNormBackwardKernelImplInternal`` (group_norm_kernel.cu)."""
    grad, x, gamma = tensor(op, 0), tensor(op, 1), tensor(op, 4)
    n, c, inner, groups = (_int(op, i) for i in range(5, 9))
    if grad is None or x is None or x.storage < 0 or not n * c * inner:
        return None
    mask = op.args[9]
    assert isinstance(mask, Sequence)
    size = itemsize(accumulator(x.dtype))
    take_grad, drop_grad = copy_of("gradient", grad)
    take_x, drop_x = copy_of("input", x)
    results = [step for i in range(3) for step in gradient(mask, i)]
    steps: list[Step] = [*take_grad, *take_x, *results]
    if inner != 1:
        steps += [Take("ds", n * c * size), Take("db", n * c * size)]
    if mask[0]:
        steps += [Take("c2", n * groups * size), Take("c3", n * groups * size)]
        if inner != 1 and gamma is not None:
            steps.append(Take("c1", n * c * size))
        steps += [Drop("c3"), Drop("c2"), Drop("c1")]
    return [*steps, Drop("db"), Drop("ds"), *drop_x, *drop_grad]


def _int(op: Op, position: int) -> int:
    value = op.args[position]
    assert isinstance(value, int)
    return value


NORM: dict[str, Rule] = {
    "native_layer_norm.default": _layer_norm,
    "native_layer_norm_backward.default": _layer_norm_backward,
    "_fused_rms_norm.default": _rms_norm,
    "_fused_rms_norm_backward.default": _rms_norm_backward,
    "native_group_norm.default": _group_norm,
    "native_group_norm_backward.default": _group_norm_backward,
}
