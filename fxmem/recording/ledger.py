"""Which storages exist, where, and when they are born and die. Nothing here keeps one alive.

A storage's death is seen by a weak reference to it, at the moment it happens. Storages carry
a place: on the device (counted, with an index), or on the host (``HOST``, not counted), as a
CUDA run would have them.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch

from fxmem.tape import Role

NODE_SHIFT = 16

HOST = -1
"""In place of a storage's index: the storage is host memory."""


class TensorNote(NamedTuple):
    """What is kept of a tensor that an operator saw."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    node: int
    """Which operator returned this tensor object, ``op << NODE_SHIFT | position``; -1 if none did."""


class StorageNote:
    """One device storage; the role is settled after the run."""

    __slots__ = ("dtype", "maker", "module", "name", "nbytes", "op", "role", "shape")

    def __init__(
        self, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype, op: int | None, maker: int | None = None
    ) -> None:
        self.nbytes = nbytes
        self.shape = shape
        self.dtype = dtype
        self.op = op
        self.maker = maker
        """Sequence number of the backward node that was running, ``None`` outside the engine."""
        self.role: Role | None = None
        self.name = ""
        self.module = ""


class _Life(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a live storage that knows the storage's index."""

    __slots__ = ("key", "sid")

    sid: int
    key: int


class Ledger:
    """Writes down births and deaths as the tape has them: ``sid`` and ``~sid``."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.storages: list[StorageNote] = []
        self._lives: dict[int, _Life] = {}

    def index(self, tensor: torch.Tensor) -> int:
        """Index of the tensor's device storage, or ``HOST``."""
        if tensor.layout is not torch.strided:
            return HOST
        life = self._lives.get(tensor.untyped_storage()._cdata)
        return life.sid if life is not None else HOST

    def note(self, t: torch.Tensor) -> TensorNote:
        """What a tape keeps of ``t``."""
        if t.layout is not torch.strided:
            return TensorNote(HOST, tuple(t.shape), (), t.dtype, 0, -1)
        life = self._lives.get(t.untyped_storage()._cdata)
        sid = life.sid if life is not None else HOST
        node = getattr(t, "_fxmem_node", -1)
        return TensorNote(sid, tuple(t.shape), t.stride(), t.dtype, int(t.storage_offset()), node)

    def result(
        self, t: torch.Tensor, node: int, op: int, maker: int | None, *, on_device: bool,
        donor: torch.UntypedStorage | None = None,
    ) -> TensorNote:  # fmt: skip
        """Note an operator's result; a storage not seen before is born.

        Args:
            t: The result.
            node: Names operator and position, see :class:`TensorNote`.
            op: The operator's index.
            maker: See :class:`StorageNote`.
            on_device: Where a new storage is.
            donor: Storage whose memory the result takes over instead of being born.
        """
        if t.layout is not torch.strided:
            return TensorNote(HOST, tuple(t.shape), (), t.dtype, 0, node)
        storage = t.untyped_storage()
        life = self._lives.get(storage._cdata)
        if life is not None:
            sid = life.sid
        elif donor is not None:
            sid = self._lives.pop(donor._cdata).sid  # the donor's death is no event
            self._watch(storage, sid)
        else:
            sid = HOST
            if on_device:
                sid = self._born(StorageNote(storage.nbytes(), tuple(t.shape), t.dtype, op, maker))
            self._watch(storage, sid)
        t._fxmem_node = node  # type: ignore[attr-defined]
        return TensorNote(sid, tuple(t.shape), t.stride(), t.dtype, int(t.storage_offset()), node)

    def adopt(self, tensor: torch.Tensor, role: Role, name: str, module: str = "") -> int:
        """Put an existing tensor on the device, as ``tensor.to("cuda")`` would.

        Args:
            tensor: A parameter, buffer or input; copied densely, so it takes
                ``numel * itemsize`` bytes whatever storage it is a view of.
            role: What it is.
            name: Its name.
            module: Path of the module that owns it.

        Returns:
            The index of its device storage.
        """
        note = StorageNote(tensor.numel() * tensor.element_size(), tuple(tensor.shape), tensor.dtype, None)
        note.role, note.name, note.module = role, name, module
        tensor._fxmem_node = -1  # type: ignore[attr-defined]
        storage = tensor.untyped_storage()
        known = self._lives.pop(storage._cdata, None)
        sid = self._born(note)
        if known is None or known.sid == HOST:
            self._watch(storage, sid)
        else:  # a second view of a storage that is there already: a copy of its own, kept to the end
            self._lives[storage._cdata] = known
        return sid

    def alias(self, stand_in: torch.UntypedStorage, original: torch.Tensor) -> None:
        """Let ``stand_in`` speak for the storage of ``original``; its own death is no event."""
        life = self._lives.get(original.untyped_storage()._cdata)
        if life is not None and stand_in._cdata not in self._lives:
            other = _Life(stand_in, self._forget)
            other.sid = life.sid
            other.key = stand_in._cdata
            self._lives[other.key] = other

    def end(self, tensor: torch.Tensor) -> None:
        """Let the tensor's storage die now; what holds it on does not on a GPU."""
        life = self._lives.get(tensor.untyped_storage()._cdata)
        if life is not None and life.sid != HOST:
            del self._lives[life.key]
            self.events.append(~life.sid)

    def _born(self, note: StorageNote) -> int:
        sid = len(self.storages)
        self.storages.append(note)
        self.events.append(sid)
        return sid

    def _watch(self, storage: torch.UntypedStorage, sid: int) -> None:
        life = _Life(storage, self._died)
        life.sid = sid
        life.key = storage._cdata
        self._lives[life.key] = life

    def _died(self, life: Any) -> None:
        key, sid = life.key, life.sid
        if self._lives.get(key) is life:
            del self._lives[key]
            if sid != HOST:
                self.events.append(~sid)

    def _forget(self, life: Any) -> None:
        key = life.key
        if self._lives.get(key) is life:
            del self._lives[key]
