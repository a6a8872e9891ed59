"""Sort, top-k and median: which of torch's sorts runs, and the memory it works in.

Mirrors aten/src/ATen/native/cuda/{Sort,Sorting,TensorTopK,SortStable}.c* of torch 2.14; the sorts
themselves are CUB's (:mod:`fxmem.kernels.cub`).
"""

from __future__ import annotations

import math

from fxmem.kernels import cub
from fxmem.kernels.copies import copy
from fxmem.kernels.steps import (
    Drop,
    Out,
    Rule,
    Step,
    Take,
    Target,
    argument,
    itemsize,
    launch_scratch,
    nbytes,
    numel,
    tensor,
)
from fxmem.tape import Op, TensorMeta

_SMALL_SORT = 4096
"""``should_use_small_sort`` (SortingCommon.cuh): slices up to this are sorted in place."""

_LARGE_SORT = 1_000_000
"""Slices from this on are sorted one by one (``launch_stable_sort_kernel``)."""

_MANY_SEGMENTS = 128

_RADIX_DIGITS = 256
_BLOCK_THREADS = 256
_TOPK_REGISTERS = 40 * _BLOCK_THREADS
_SM_REGISTERS = 65536
_TOPK_ITEMS = (4, 64)
"""``MIN_ITEMS_PER_THREAD``, ``MAX_ITEMS_PER_THREAD`` of ``mbtopk`` (TensorTopK.cu)."""


def _dimension(op: Op, position: int, default: int = -1) -> int:
    dim = argument(op, position, "dim", default)
    return dim if isinstance(dim, int) else default


def _sort(op: Op, target: Target) -> list[Step] | None:
    """``sort_stable_out`` (Sort.cpp)."""
    x = tensor(op, 0)
    if x is None or not numel(x):
        return None
    dim = _dimension(op, 2 if op.name == "sort.stable" else 1)
    return [Out(0), Out(1), *sort_steps(x, dim, target)]


def sort_steps(x: TensorMeta, dim: int, target: Target) -> list[Step]:
    """``launch_stable_sort_kernel`` (SortStable.cu): what a sort takes once its results exist.

    Args:
        x: The sorted tensor.
        dim: The dimension sorted along.
        target: The GPU.
    """
    length = x.shape[dim] if x.shape else 1
    if length <= _SMALL_SORT:
        return [Take("positions", length * 8), Drop("positions")]
    count, key = numel(x), itemsize(x.dtype)
    segments = count // length
    before = [] if x.shape[dim] and _innermost(x, dim) else [Take("input", nbytes(x))]
    if segments == 1 or length >= _LARGE_SORT:
        scratch = cub.radix_sort(length, key, 8, 8 * key, target)
        each: list[Step] = [launch_scratch("sort", scratch), Drop("sort")]
        return [*before, Take("positions", length * 8), *each * segments, Drop("positions")]
    if segments < _MANY_SEGMENTS:
        return before + _full_sort(count, key, segments, target)
    return [
        *before, Take("positions", count * 8),
        launch_scratch("sort", cub.alias(count * key, count * 8)), Drop("sort"), Drop("positions"),
    ]  # fmt: skip


def _innermost(x: TensorMeta, dim: int) -> bool:
    """Whether slices lie dense and one after the other, so that they are sorted where they are."""
    return not copy("", x) and dim % len(x.shape) == len(x.shape) - 1


def _full_sort(count: int, key: int, segments: int, target: Target) -> list[Step]:
    """``segmented_sort_pairs_by_full_sort``: by key, then stably by segment."""
    by_key = cub.radix_sort(count, key, 8, 8 * key, target)
    by_segment = cub.radix_sort(count, 8, 0, cub.bits_of(segments), target)
    return [
        Take("pairs", count * 8), Take("sorted pairs", count * 8), Take("sorted keys", count * key),
        launch_scratch("by key", by_key), Drop("by key"), Drop("sorted keys"), launch_scratch("by segment", by_segment),
    ]  # fmt: skip


def _topk(op: Op, target: Target) -> list[Step] | None:
    """``topk_out_cuda`` (TensorTopK.cpp), ``launch_gather_topk_kernel`` (TensorTopK.cu)."""
    x = tensor(op, 0)
    if x is None or not numel(x) or not x.shape:
        return None
    return [Out(0), Out(1), *topk_steps(x, _dimension(op, 2), target)]


def topk_steps(x: TensorMeta, dim: int, target: Target) -> list[Step]:
    """``launch_gather_topk_kernel`` (TensorTopK.cu): what top-k takes once its results exist."""
    length = x.shape[dim]
    slices = numel(x) // length
    steps = copy("input", x)
    if not _several_blocks(slices, length):
        return steps
    capacity = target.sm_count * (_SM_REGISTERS // _TOPK_REGISTERS) * _BLOCK_THREADS
    items = max(_TOPK_ITEMS[0], min(-(-numel(x) // capacity), _TOPK_ITEMS[1]))
    blocks = slices * -(-length // (items * _BLOCK_THREADS))
    key = itemsize(x.dtype)
    scratch = cub.scan_by_key(blocks, 4, target)
    return [
        *steps, Take("kth values", slices * key), Take("k to find", slices * 8),
        Take("desired", slices * 2 * max(4, key)), launch_scratch("counts", blocks * _RADIX_DIGITS * 2),
        launch_scratch("digit sums", slices * _RADIX_DIGITS * 4),
        launch_scratch("within k", blocks * 4), launch_scratch("kth counts", blocks * 4),
        launch_scratch("first scan", scratch), Drop("first scan"), launch_scratch("second scan", scratch),
    ]  # fmt: skip


_SEVERAL_BLOCKS = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
"""Up to so many slices, the length from which several blocks share one (``should_use_multiblock``)."""


def _several_blocks(slices: int, length: int) -> bool:
    for most, least in _SEVERAL_BLOCKS:
        if slices <= most:
            return length >= least
    return length >= 400


def _median(op: Op, target: Target) -> list[Step] | None:
    """``median_impl`` (Sorting.cpp): the whole tensor is sorted, then looked at for a NaN."""
    x = tensor(op, 0)
    if x is None or not numel(x):
        return None
    flat = x._replace(shape=(numel(x),), stride=(1,), offset=0)
    return [
        *copy("input", x), Take("values", nbytes(flat)), Take("indices", numel(flat) * 8),
        *sort_steps(flat, 0, target), Drop("indices"), Take("nan", 1), Out(0),
    ]  # fmt: skip


def _randperm(op: Op, target: Target) -> list[Step] | None:
    """``randperm_out_cuda`` (Randperm.cu): random keys of just enough bits, sorted with the positions."""
    n = argument(op, 0, "n")
    if not isinstance(n, int) or not op.outputs or n == 0:
        return None
    result = op.outputs[0]
    bits = _random_bits(n)
    key, value = 4 if bits <= 32 else 8, itemsize(result.dtype)
    return [
        Out(0), Take("largest", value), Drop("largest"), Take("range", n * value),
        Take("keys", n * key), Take("sorted keys", n * key),
        launch_scratch("sort", cub.radix_sort(n, key, value, bits, target)),
    ]  # fmt: skip


def _random_bits(n: int) -> int:
    """Bits with which all ``n`` keys differ with a probability of 0.9 in twelve islands (note in Randperm.cu)."""
    scale = math.log(0.9) * 12
    return min(64, math.ceil(math.log2(n - (6 * n * n + 1) / scale)))


SORTING: dict[str, Rule] = {
    "sort.default": _sort,
    "sort.stable": _sort,
    "topk.default": _topk,
    "median.default": _median,
    "nanmedian.default": _median,
    "randperm.default": _randperm,
}
