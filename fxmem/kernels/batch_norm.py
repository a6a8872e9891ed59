"""Batch normalisation: which implementation CUDA takes, its scratch memory and the order of results.

A trace on CPU tensors shows ``native_batch_norm`` where a CUDA run may take ``cudnn_batch_norm``
(``_select_batch_norm_backend`` in aten/src/ATen/native/Normalization.cpp). The workspace that cuDNN
may ask for itself is not known without a GPU and counted as none (docs/architecture.md).
Kernels: aten/src/ATen/native/cuda/Normalization.cu and Normalization.cuh,
aten/src/ATen/native/cudnn/BatchNorm.cpp (torch 2.14).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence

from fxmem.kernels.norm import copy_of, gradient
from fxmem.kernels.reductions import accumulator, reduce_steps, welford
from fxmem.kernels.steps import (
    Drop,
    Out,
    Rule,
    Step,
    Take,
    Target,
    channels_last,
    contiguous,
    itemsize,
    launch_scratch,
    nbytes,
    numel,
    suggests_channels_last,
    tensor,
)  # fmt: skip
from fxmem.tape import Op, TensorMeta

_INT_MAX = 2**31 - 1


class _Kernels(enum.Enum):
    """``Impl`` of Normalization.cu."""

    CONTIGUOUS = enum.auto()
    CHANNELS_LAST = enum.auto()
    GENERAL = enum.auto()


def uses_cudnn(dtype: str, weight: str | None, shape: Sequence[int], *, stats: bool, training: bool) -> bool:
    """``_select_batch_norm_backend`` for a module that has a bias if it has a weight.

    Args:
        dtype: The input's type.
        weight: The weight's type, ``None`` without one.
        shape: The input's shape.
        stats: Whether there are running statistics.
        training: Whether the batch's own statistics are used.
    """
    if weight is None or "bfloat16" in (dtype, weight) or (dtype == "float16" and weight != "float32"):
        return False
    if not stats and not training:
        return False
    return len(shape) >= 3 and shape[0] <= (880801 if training else 65535)


def channels_last_kernels(meta: TensorMeta) -> bool:
    """``batch_norm_use_channels_last_kernels``."""
    return channels_last(meta) or (contiguous(meta) and meta.stride[1] == 1)


def _kernels(*operands: TensorMeta) -> _Kernels:
    """``batch_norm_choose_impl``."""
    kinds = {_kernels_of(meta) for meta in operands}
    return kinds.pop() if len(kinds) == 1 else _Kernels.GENERAL


def _kernels_of(meta: TensorMeta) -> _Kernels:
    if not _small(meta):
        return _Kernels.GENERAL
    if contiguous(meta):
        return _Kernels.CHANNELS_LAST if meta.stride[1] == 1 else _Kernels.CONTIGUOUS
    return _Kernels.CHANNELS_LAST if channels_last(meta) and len(meta.shape) == 4 else _Kernels.GENERAL


def _small(meta: TensorMeta) -> bool:
    """``canUse32BitIndexMath``."""
    return numel(meta) < _INT_MAX and sum((n - 1) * s for n, s in zip(meta.shape, meta.stride, strict=True)) < _INT_MAX


def _grid(rows: int, channels: int) -> tuple[int, int]:
    """``flexible_launch_configs`` (Normalization.cuh) with cooperating blocks: the grid's x and y."""
    width = min(_power_of_two(channels), 32)
    height = min(_power_of_two(-(-rows // 16)), 512 // width)
    if width * height != 512:
        width = min(_power_of_two(channels), 512 // height)
    blocks = min(-(-rows // (height * 16)), 128)
    return -(-channels // width), blocks if blocks >= 8 else 1


def _power_of_two(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n > 0 else 1


def _staging(x: TensorMeta, values: int) -> list[Step]:
    """Partial results of the channels-last kernels, ``values`` a channel and block, and semaphores."""
    channels = x.shape[1]
    across, down = _grid(numel(x) // channels, channels)
    if down == 1:
        return []
    size = itemsize(accumulator(x.dtype))
    return [
        launch_scratch("staging", values * channels * down * size), launch_scratch("semaphores", 4 * across),
        Drop("semaphores"), Drop("staging"),
    ]  # fmt: skip


def _forward(op: Op, target: Target) -> list[Step] | None:
    """``cudnn_batch_norm`` (cudnn/BatchNorm.cpp) or ``batch_norm_cuda`` (cuda/Normalization.cu)."""
    x, weight = tensor(op, 0), tensor(op, 1)
    if x is None or x.storage < 0 or not numel(x):
        return None
    training = bool(op.args[5])
    results: list[Step] = [Out(0), Out(1), Out(2)]
    if uses_cudnn(x.dtype, weight and weight.dtype, x.shape, stats=tensor(op, 3) is not None, training=training):
        take, drop = _as_suggested("input", x)
        return [*take, *results, *drop]
    steps = results + (_statistics(x, target) if training else [])
    if _kernels(x) is _Kernels.GENERAL:  # `batch_norm_elementwise` broadcasts: ones and zeros for what is missing
        one = itemsize(accumulator(x.dtype))
        steps += [Take(key, one) for key, given in (("weight", weight), ("bias", tensor(op, 2))) if given is None]
    return steps


def _statistics(x: TensorMeta, target: Target) -> list[Step]:
    """``batch_norm_mean_var``."""
    match _kernels(x):
        case _Kernels.CONTIGUOUS:
            return []
        case _Kernels.CHANNELS_LAST:
            return _staging(x, 4)
        case _Kernels.GENERAL:
            stat = TensorMeta(-1, (x.shape[1],), (1,), accumulator(x.dtype))
            dims = [d for d in range(len(x.shape)) if d != 1]
            read_as = x.dtype if x.dtype == "float16" else stat.dtype
            return reduce_steps(x, (stat, stat), dims, welford, target, read_as=read_as)


def _as_suggested(key: str, meta: TensorMeta, like: TensorMeta | None = None) -> tuple[list[Step], list[Step]]:
    """``contiguous(suggest_memory_format())``, of ``like`` if that is another tensor."""
    if suggests_channels_last(like or meta):
        return ([], []) if channels_last(meta) else ([Take(key, nbytes(meta))], [Drop(key)])
    return copy_of(key, meta)


def _reshaped(key: str, meta: TensorMeta) -> tuple[list[Step], list[Step]]:
    """``reshape({N, C, -1})``: a copy where the inner dimensions do not merge."""
    inner = [(n, s) for n, s in zip(meta.shape[2:], meta.stride[2:], strict=True) if n != 1]
    merges = all(s == after * n for (_, s), (n, after) in itertools.pairwise(inner))
    return ([], []) if merges else ([Take(key, nbytes(meta))], [Drop(key)])


def _backward(op: Op, target: Target) -> list[Step] | None:
    """``cudnn_batch_norm_backward`` (BatchNorm.cpp) or ``batch_norm_backward_cuda`` (Normalization.cu)."""
    grad, x, weight = tensor(op, 0), tensor(op, 1), tensor(op, 2)
    if grad is None or x is None or x.storage < 0 or not numel(x):
        return None
    training, mask = bool(op.args[7]), op.args[9]
    assert isinstance(mask, Sequence)
    wanted = (bool(mask[0]), bool(mask[1]), bool(mask[2]))
    stats = tensor(op, 3) is not None
    if training and uses_cudnn(x.dtype, weight and weight.dtype, x.shape, stats=stats, training=True):
        return _cudnn_backward(grad, x, weight, wanted)
    fused = (training or wanted[1] or wanted[2]) and wanted[0] and not channels_last_kernels(x)
    if fused and _small(x) and _small(grad):
        take_x, drop_x = _reshaped("input", x)
        take_grad, drop_grad = _reshaped("gradient", grad)
        results = [step for i in range(3) for step in gradient(wanted, i)]
        return [*take_x, *take_grad, *results, *drop_grad, *drop_x]
    return _native_backward(op, grad, x, wanted)


def _cudnn_backward(
    grad: TensorMeta, x: TensorMeta, weight: TensorMeta | None, wanted: tuple[bool, bool, bool]
) -> list[Step]:
    """All three gradients, wanted or not; the gradient in the input's format."""
    assert weight is not None
    take, drop = _as_suggested("gradient", grad, x)
    sizes = (nbytes(x), nbytes(weight), nbytes(weight))
    steps = list(take)
    for i, size in enumerate(sizes):
        steps += gradient(wanted, i) or [Take(f"unwanted {i}", size)]
    return [*steps, *drop]


def _native_backward(op: Op, grad: TensorMeta, x: TensorMeta, wanted: tuple[bool, bool, bool]) -> list[Step]:
    """Sums first, then the input's gradient by a kernel of its own."""
    weight, running, save_mean = tensor(op, 2), tensor(op, 3), tensor(op, 5)
    training = bool(op.args[7])
    size = x.shape[1] * itemsize(accumulator(x.dtype))
    steps: list[Step] = []
    sums = training or wanted[1] or wanted[2]
    if save_mean is not None and not numel(save_mean):
        if sums and running is not None and running.dtype != accumulator(x.dtype):
            steps.append(Take("mean", size))
        steps.append(Take("invstd", size))
    if sums:
        steps += _sums(grad, x, weight, wanted)
    if wanted[0]:
        if training and weight is None and _kernels(x, grad) is _Kernels.GENERAL:
            steps.append(Take("one", itemsize(accumulator(x.dtype))))
        steps += gradient(wanted, 0)
    return steps


def _sums(grad: TensorMeta, x: TensorMeta, weight: TensorMeta | None, wanted: tuple[bool, bool, bool]) -> list[Step]:
    """``batch_norm_backward_reduce_cuda``."""
    size = x.shape[1] * itemsize(accumulator(x.dtype))
    totals: list[Step] = [Take("sum dy", size), Take("sum dy xmu", size)]
    if _small(grad) and channels_last_kernels(grad) and channels_last_kernels(x):
        steps = totals
        if weight is not None:
            for i in (1, 2):
                steps += gradient(wanted, i) or [Take(f"unwanted {i}", nbytes(weight))]
        return steps + _staging(x, 2)
    take_x, drop_x = _reshaped("input", x)
    take_grad, drop_grad = _reshaped("gradient", grad)
    steps = [*take_x, *take_grad, *(totals if wanted[0] else ()), *gradient(wanted, 1), *gradient(wanted, 2)]
    return [*steps, *drop_grad, *drop_x]


BATCH_NORM: dict[str, Rule] = {
    "native_batch_norm.default": _forward,
    "native_batch_norm_backward.default": _backward,
}
