"""The vocabulary of kernel rules: what one operator call allocates, in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fxmem.cudnn import Workspaces
from fxmem.tape import Op, Ref, Role, TensorMeta


class Out(NamedTuple):
    """Allocate a result here (ignored if that result is a view or written in place)."""

    position: int


class Size(NamedTuple):
    """On CUDA the storage of a result takes ``nbytes``, not what the trace shows; 0: it is not allocated."""

    position: int
    nbytes: int


class Take(NamedTuple):
    """Allocate memory that the trace does not show."""

    key: str
    """Names it for :class:`Drop` within the call; what is not dropped is freed at the call's end."""
    nbytes: int
    role: Role = Role.TEMPORARY
    keep: bool = False
    """Held for ever: taken only the first time that a thread asks for this key."""


class Drop(NamedTuple):
    """Free what was taken under ``key``."""

    key: str


Step = Out | Size | Take | Drop


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What kernel choices depend on, beside the call itself."""

    sm: int
    """Compute capability as one number: 75, 80, 86, 89, 90, 100, 120."""
    sm_count: int
    torch_version: tuple[int, int] = (2, 14)
    workspaces: Workspaces | None = field(default=None, compare=False, repr=False)
    """What cuDNN's convolutions take; ``None`` leaves them out."""


Rule = Callable[[Op, Target], Sequence[Step] | None]
"""``None``: the rule has nothing to say about this call."""

_SIZES = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "complex128": 16, "complex32": 4, "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return _SIZES[dtype]


def numel(meta: TensorMeta) -> int:
    """Elements of a tensor."""
    return math.prod(meta.shape)


def nbytes(meta: TensorMeta) -> int:
    """Bytes of a dense tensor of this shape."""
    return numel(meta) * itemsize(meta.dtype)


def tensor(op: Op, position: int) -> TensorMeta | None:
    """The tensor passed as positional argument ``position``, if one was."""
    value = op.args[position] if position < len(op.args) else None
    return op.inputs[value.at] if isinstance(value, Ref) else None


def argument(op: Op, position: int, name: str, default: object = None) -> object:
    """A non-tensor argument by position or name."""
    if position < len(op.args):
        return op.args[position]
    return dict(op.kwargs).get(name, default)


def contiguous(meta: TensorMeta) -> bool:
    """Whether the tensor is dense in row-major order."""
    expected = 1
    for size, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def channels_last(meta: TensorMeta) -> bool:
    """Whether a 4-D or 5-D tensor is dense with its channels innermost."""
    if len(meta.shape) not in (4, 5):
        return False
    order = (1, *range(len(meta.shape) - 1, 1, -1), 0)
    expected = 1
    for d in order:
        if meta.shape[d] != 1:
            if meta.stride[d] != expected:
                return False
            expected *= meta.shape[d]
    return True


def suggests_channels_last(meta: TensorMeta) -> bool:
    """``suggest_memory_format`` of c10/core/MemoryFormat.h: strides rather than density decide."""
    if len(meta.shape) not in (4, 5):
        return False
    least = 0
    if meta.stride[1] == 0:
        return False
    order = (1, *range(len(meta.shape) - 1, 1, -1), 0)
    for d in order:
        size, stride = meta.shape[d], meta.stride[d]
        if size == 0 or stride < least:
            return False
        if d == 0 and least == meta.stride[1]:
            return False
        least = stride
        if size > 1:
            least *= size
    return True


def launch_scratch(key: str, nbytes: int) -> Take:
    """Memory whose size follows the launch (grid, tiles, bins) rather than a tensor's shape.

    It counts as a workspace, and the batch law, which is about tensors, leaves it out.
    """
    return Take(key, nbytes, Role.WORKSPACE)
