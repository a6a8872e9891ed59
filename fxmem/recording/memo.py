"""Results of fake calls remembered by their arguments' shapes: most calls of a run repeat.

``FakeTensorMode`` has such a cache, but building its keys costs more than most meta kernels.
The recorder has each argument's shape, strides and dtype at hand anyway, so its key is free.
Only calls whose result follows from these are remembered: new dense tensors, views of one
argument, and in-place calls that leave shapes alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fxmem.recording.ledger import TensorNote

_CPU = torch.device("cpu")
_META = torch.device("meta")


class _New(NamedTuple):
    """A result with memory of its own."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _View(NamedTuple):
    """A result that looks at the memory of tensor argument ``of``."""

    of: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Constant(NamedTuple):
    value: object


class _Argument(NamedTuple):
    """The result is tensor argument ``of`` itself, written in place."""

    of: int


_Part = _New | _View | _Constant | _Argument


class Entry(NamedTuple):
    """What a call returns."""

    parts: tuple[_Part, ...]
    container: type | None
    """``tuple`` or ``list``; ``None`` for a single result."""


class Memo:
    """Remembers calls of one ``FakeTensorMode``."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._fake_mode = weakref.ref(fake_mode)
        self._entries: dict[Any, Entry | None] = {}

    def key(self, func: Any, notes: Sequence[TensorNote], args: tuple[Any, ...], kwargs: tuple[Any, ...]) -> Any:
        """A hashable key, or ``None`` if an argument has no hash."""
        key = (
            func, args, kwargs, tuple([type(a) for a in args]), torch.get_default_dtype(),
            torch.is_inference_mode_enabled(), tuple([(n.shape, n.stride, n.dtype, n.offset) for n in notes]),
        )  # fmt: skip
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def known(self, key: Any, tensors: list[torch.Tensor]) -> tuple[bool, Any]:
        """Whether the call is known, and then its result."""
        entry = self._entries.get(key)
        if entry is None:
            return False, None
        parts = [self._made(p, tensors) for p in entry.parts]
        return True, parts[0] if entry.container is None else entry.container(parts)

    def learn(self, key: Any, func: Any, tensors: list[torch.Tensor], out: Any) -> None:
        """Remember a call that has just been computed, if it can be."""
        if key in self._entries:
            return
        self._entries[key] = None
        if torch.Tag.inplace_view in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            return
        if any(t.layout is not torch.strided for t in tensors):
            return
        items = out if isinstance(out, (tuple, list)) else (out,)
        container = type(out) if isinstance(out, (tuple, list)) else None
        if container not in (None, tuple, list):
            return
        owners = {t.untyped_storage()._cdata: i for i, t in enumerate(tensors)}
        parts: list[_Part] = []
        for item in items:
            part = _part(item, tensors, owners)
            if part is None:
                return
            parts.append(part)
        self._entries[key] = Entry(tuple(parts), container)

    def _made(self, part: _Part, tensors: list[torch.Tensor]) -> Any:
        match part:
            case _New():
                meta = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device=_META)
            case _View():
                base: Any = tensors[part.of]
                meta = torch.empty_strided((0,), (1,), dtype=part.dtype, device=_META)
                meta.set_(base.untyped_storage(), part.offset, part.shape, part.stride)
            case _Argument():
                return tensors[part.of]
            case _Constant():
                return part.value
        mode = self._fake_mode()
        assert mode is not None
        return FakeTensor(mode, meta, _CPU)


def _part(item: Any, tensors: list[torch.Tensor], owners: dict[int, int]) -> _Part | None:
    if item is None or isinstance(item, (int, float, bool)):
        return _Constant(item)
    if not isinstance(item, FakeTensor) or item.layout is not torch.strided or item.constant is not None:
        return None
    if item.fake_device != _CPU or item.is_conj() or item.is_neg() or item.is_inference():
        return None
    for i, t in enumerate(tensors):
        if item is t:
            return _Argument(i)
    owner = owners.get(item.untyped_storage()._cdata)
    if owner is not None:
        return _View(owner, tuple(item.shape), item.stride(), int(item.storage_offset()), item.dtype)
    part = _New(tuple(item.shape), item.stride(), item.dtype)
    dense = torch.empty_strided(part.shape, part.stride, dtype=part.dtype, device=_META)
    if item.storage_offset() or dense.untyped_storage().nbytes() != item.untyped_storage().nbytes():
        return None
    return part


_MEMOS: weakref.WeakKeyDictionary[FakeTensorMode, Memo] = weakref.WeakKeyDictionary()


def memo_of(fake_mode: FakeTensorMode) -> Memo:
    """The memo of ``fake_mode``, shared by all runs on its tensors."""
    memo = _MEMOS.get(fake_mode)
    if memo is None:
        memo = _MEMOS[fake_mode] = Memo(fake_mode)
    return memo


def forget(fake_mode: FakeTensorMode) -> None:
    """Start anew: what was remembered for ``fake_mode`` is dropped (benchmarks start cold)."""
    _MEMOS.pop(fake_mode, None)
