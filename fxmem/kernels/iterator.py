"""``TensorIterator`` for a reduction: the operands' dimensions, reordered and coalesced.

Mirrors ``TensorIteratorBase`` in aten/src/ATen/TensorIterator.cpp (``reorder_dimensions``,
``coalesce_dimensions``, ``can_use_32bit_indexing``, ``split``) as far as kernels' launch
configurations depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fxmem.kernels.steps import itemsize
from fxmem.tape import TensorMeta

_INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A reduction's operands over common dimensions, fastest first; the output's strides are 0 where reduced."""

    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    """In bytes, per operand: outputs, then the input."""
    offset: int
    """Bytes from an aligned address to the input's first element."""
    output_itemsize: int

    @property
    def numel(self) -> int:
        """Elements read."""
        return math.prod(self.shape)

    @property
    def outputs(self) -> int:
        """``num_output_elements``."""
        return math.prod(n for n, s in zip(self.shape, self.strides[0], strict=True) if s != 0 or n == 0)

    @property
    def reduced_dims(self) -> int:
        """``num_reduce_dims``; they come first."""
        return sum(s == 0 for s in self.strides[0])

    @property
    def along_fastest(self) -> bool:
        """``reduction_on_fastest_striding_dimension`` of ``setReduceConfig``."""
        reduced, strides = self.reduced_dims, self.strides[-1]
        return reduced == len(self.shape) or strides[0] < strides[reduced]

    @property
    def fastest_stride(self) -> int | None:
        """``fastest_moving_stride`` of ``setReduceConfig``, in bytes; ``None`` without dimensions."""
        if not self.shape:
            return None
        return self.strides[-1][0 if self.along_fastest else self.reduced_dims]

    def output_vector(self, scalar: int) -> int:
        """``get_output_vec_size`` (Reduce.cuh): outputs that a thread handles at once."""
        at = self.reduced_dims
        vector = 4
        others = (s // scalar for j, s in enumerate(self.strides[-1]) if j != at)
        for n in (self.offset // scalar, self.shape[at], *others):
            while n % vector:
                vector //= 2
        return vector

    def split_for_32_bits(self) -> list[Reduction]:
        """``with_32bit_indexing``: parts, in order, whose byte offsets fit an ``int``."""
        if self._fits_32_bits():
            return [self]
        dim = self._dim_to_split()
        size = self.shape[dim]
        parts = (self._narrow(dim, 0, size // 2), self._narrow(dim, size // 2, size - size // 2))
        return [piece for part in parts for piece in part.split_for_32_bits()]

    def _fits_32_bits(self) -> bool:
        if self.numel > _INT_MAX:
            return False
        spans = (sum((n - 1) * s for n, s in zip(self.shape, strides, strict=True)) for strides in self.strides)
        return all(1 + span <= _INT_MAX for span in spans)

    def _dim_to_split(self) -> int:
        extents = [
            (max((n - 1) * abs(strides[dim]) for strides in self.strides), dim) for dim, n in enumerate(self.shape)
        ]
        return max(extents)[1]

    def _narrow(self, dim: int, start: int, size: int) -> Reduction:
        shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
        return replace(self, shape=shape, offset=self.offset + start * self.strides[-1][dim])


def reduction(source: TensorMeta, results: Sequence[TensorMeta], dims: Iterable[int], *, keepdim: bool) -> Reduction:
    """``make_reduction`` (ReduceOpsUtils.h) and ``TensorIterator::reduce_op``.

    Args:
        source: What is reduced.
        results: One or two results, with the dimensions that ``keepdim`` says.
        dims: The reduced dimensions, wrapped; none for a reduction to one element.
        keepdim: Whether the results keep them.
    """
    reduced = set(dims) or set(range(len(source.shape)))
    operands = [_output_strides(result, source.shape, reduced, keepdim) for result in results]
    operands.append([s * itemsize(source.dtype) for s in source.stride])
    order = _order(source.shape, operands, len(results))
    shape = [source.shape[d] for d in order]
    strides = [[operand[d] for d in order] for operand in operands]
    _coalesce(shape, strides)
    return Reduction(
        shape=tuple(shape), strides=tuple(tuple(s) for s in strides),
        offset=source.offset * itemsize(source.dtype), output_itemsize=itemsize(results[0].dtype),
    )  # fmt: skip


def result_strides(shape: tuple[int, ...], operands: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Strides of an elementwise result: dense, dimensions in the operands' order (``allocate_or_resize_outputs``).

    Args:
        shape: The broadcast shape.
        operands: Each operand's strides in that shape, 0 where it is broadcast.
    """
    strides = [0] * len(shape)
    step = 1
    for d in _order(shape, operands, 0):
        strides[d] = step
        step *= shape[d]
    return tuple(strides)


def _output_strides(result: TensorMeta, shape: tuple[int, ...], reduced: set[int], keepdim: bool) -> list[int]:
    """``review_reduce_result``, then ``compute_strides``: bytes, 0 in reduced dimensions."""
    size = itemsize(result.dtype)
    if keepdim:
        pairs = enumerate(zip(shape, result.stride, strict=True))
        return [0 if d in reduced and n != 1 else stride * size for d, (n, stride) in pairs]
    strides = iter(result.stride)
    return [0 if d in reduced else next(strides) * size for d in range(len(shape))]


def _order(shape: tuple[int, ...], operands: Sequence[Sequence[int]], outputs: int) -> list[int]:
    """``reorder_dimensions``: ascending strides with reduced dimensions in front."""
    order = list(range(len(shape)))[::-1]
    for i in range(1, len(order)):
        at = i
        for before in range(i - 1, -1, -1):
            swap = _compare(shape, operands, outputs, (order[before], order[at]))
            if swap > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif swap < 0:
                break
    return order


def _compare(shape: tuple[int, ...], operands: Sequence[Sequence[int]], outputs: int, dims: tuple[int, int]) -> int:
    """``should_swap``: 1 if the first dimension comes after the second, -1 before, 0 if that is open."""
    a, b = dims
    for index, strides in enumerate(operands):
        first, second = strides[a], strides[b]
        if index < outputs and (first == 0) != (second == 0):
            return 1 if second == 0 else -1
        if first == 0 or second == 0:
            continue
        if first != second:
            return -1 if first < second else 1
        if shape[a] > shape[b]:
            return 1
    return 0


def _coalesce(shape: list[int], operands: list[list[int]]) -> None:
    """``coalesce_dimensions``, in place."""
    if len(shape) <= 1:
        return
    last = 0
    for dim in range(1, len(shape)):
        if shape[last] == 1 or shape[dim] == 1 or all(shape[last] * s[last] == s[dim] for s in operands):
            if shape[last] == 1:
                for s in operands:
                    s[last] = s[dim]
            shape[last] *= shape[dim]
            continue
        last += 1
        if last != dim:
            for s in operands:
                s[last] = s[dim]
            shape[last] = shape[dim]
    del shape[last + 1 :]
    for s in operands:
        del s[last + 1 :]
