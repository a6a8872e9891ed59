"""``contiguous()`` and its kin: whether a tensor is copied, and how a new one is laid out."""

from __future__ import annotations

from collections.abc import Sequence

from fxmem.kernels.steps import Drop, Step, Take, channels_last, contiguous, nbytes
from fxmem.tape import TensorMeta


def copies(meta: TensorMeta, *, nhwc: bool = False) -> bool:
    """Whether ``contiguous(format)`` copies; ``nhwc``: the channels-last format."""
    return not (channels_last(meta) if nhwc else contiguous(meta))


def copy(key: str, meta: TensorMeta | None, *, nhwc: bool = False) -> list[Step]:
    """The copy that ``contiguous(format)`` makes, if it does; an absent tensor needs none."""
    return [Take(key, nbytes(meta))] if meta is not None and copies(meta, nhwc=nhwc) else []


def dense(meta: TensorMeta, *, nhwc: bool = False) -> TensorMeta:
    """A new tensor of the same shape in that memory format."""
    last = len(meta.shape) - 1
    order = (1, *range(last, 1, -1), 0) if nhwc else tuple(range(last, -1, -1))
    return _laid_out(meta, order)


def formatted(meta: TensorMeta, *, nhwc: bool = False) -> TensorMeta:
    """``contiguous(format)``: the tensor itself where it is dense already."""
    return dense(meta, nhwc=nhwc) if copies(meta, nhwc=nhwc) else meta


def elementwise(*operands: TensorMeta) -> TensorMeta:
    """The result that ``TensorIterator`` makes from operands of one shape, in the first one's type.

    Its dimensions are ordered as the operands', the first that tells them apart deciding
    (``reorder_dimensions`` in aten/src/ATen/TensorIterator.cpp).
    """
    shape = operands[0].shape
    order = list(range(len(shape)))[::-1]
    for i in range(1, len(order)):
        at = i
        for before in range(i - 1, -1, -1):
            swap = _compare(shape, [m.stride for m in operands], order[before], order[at])
            if swap > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif swap < 0:
                break
    return _laid_out(operands[0], order)


def _compare(shape: Sequence[int], strides: Sequence[Sequence[int]], a: int, b: int) -> int:
    """``should_swap``: 1 if dimension ``a`` comes after ``b``, -1 before, 0 if that is open."""
    for stride in strides:
        if stride[a] == 0 or stride[b] == 0:
            continue
        if stride[a] != stride[b]:
            return -1 if stride[a] < stride[b] else 1
        if shape[a] > shape[b]:
            return 1
    return 0


def _laid_out(meta: TensorMeta, fastest_first: Sequence[int]) -> TensorMeta:
    strides = [1] * len(meta.shape)
    step = 1
    for d in fastest_first:
        strides[d] = step
        step *= max(meta.shape[d], 1)
    return meta._replace(stride=tuple(strides), offset=0)


def drops(steps: Sequence[Step]) -> list[Step]:
    """Give back what the steps took and still hold."""
    dropped = {step.key for step in steps if isinstance(step, Drop)}
    return [Drop(step.key) for step in steps if isinstance(step, Take) and not step.keep and step.key not in dropped]
