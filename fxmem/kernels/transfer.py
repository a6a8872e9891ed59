"""Copies between the host and the device: what is staged on the device where one memcpy does not do.

``copy_requires_temporaries`` and ``copy_kernel_cuda`` in aten/src/ATen/native/cuda/Copy.cu.
"""

from __future__ import annotations

from fxmem.kernels.copies import elementwise
from fxmem.kernels.steps import Out, Rule, Step, Take, Target, argument, contiguous, nbytes, tensor
from fxmem.tape import Op, TensorMeta


def _to_copy(op: Op, target: Target) -> list[Step] | None:
    """``_to_copy``: the result first."""
    source = tensor(op, 0)
    if source is None:
        return None
    return [Out(0), *_staged(op.outputs[0], source, bool(argument(op, 5, "non_blocking")))]


def _copy_into(op: Op, target: Target) -> list[Step] | None:
    """``copy_`` into a tensor that exists."""
    into, source = tensor(op, 0), tensor(op, 1)
    if into is None or source is None:
        return None
    return _staged(into, source, bool(argument(op, 2, "non_blocking")))


def _staged(into: TensorMeta, source: TensorMeta, non_blocking: bool) -> list[Step]:
    """Types are converted on the device if the copy does not block, else on the host."""
    up, down = source.storage < 0 <= into.storage, into.storage < 0 <= source.storage
    if not (up or down) or (into.dtype == source.dtype and _alike(into, source)):
        return []
    converted = non_blocking and into.dtype != source.dtype
    if up:
        staged = into._replace(dtype=source.dtype if non_blocking else into.dtype)
        return [Take("staged", nbytes(staged))] if converted or not contiguous(into) else []
    steps: list[Step] = []
    if converted:
        source = elementwise(source._replace(dtype=into.dtype))
        steps.append(Take("converted", nbytes(source)))
    if source.shape != into.shape or not contiguous(source):
        steps.append(Take("staged", nbytes(source._replace(shape=into.shape))))
    return steps


def _alike(a: TensorMeta, b: TensorMeta) -> bool:
    """Whether both are dense and laid out alike, so that the iterator sees one dimension."""
    return a.shape == b.shape and _strides(a) == _strides(b) == _strides(elementwise(a))


def _strides(meta: TensorMeta) -> list[int]:
    return [stride for n, stride in zip(meta.shape, meta.stride, strict=True) if n != 1]


TRANSFER: dict[str, Rule] = {"_to_copy.default": _to_copy, "copy_.default": _copy_into}
