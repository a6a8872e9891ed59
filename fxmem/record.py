"""The recorder: runs each ATen call on fake tensors and writes down what it did.

One dispatch mode does both. It holds the ``FakeTensorMode`` and hands each call to it
directly, so a recorded run costs one trip through Python per operator, not two.

What it keeps of a tensor is plain data; no tensor or storage is kept alive. A storage's
death is seen by a weak reference to it, at the moment it happens. Storages carry a place:
on the device (counted), or on the host (not counted), as a CUDA run would have them.

Small tensors whose values are known stay real and are computed for real, so that code
which asks for values (``.item()``, ``if mask.all()``) gets them. A call that mixes real
and fake tensors is fake.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fxmem.errors import DataDependentError
from fxmem.sourceline import SourceLines
from fxmem.tape import Phase, Ref, Role

aten = torch.ops.aten

REAL_LIMIT = 1 << 20
"""Elements up to which a tensor of known values stays real: large enough for position
indices and masks of long sequences, small enough to compute in microseconds."""

NODE_SHIFT = 16

HOST = -1
"""In place of a storage's index: the storage is host memory."""

_TERMINAL = 1 << 62
"""Sequence numbers from here on belong to ``AccumulateGrad``, which has no forward operator."""


class TensorNote(NamedTuple):
    """What is kept of a tensor that an operator saw."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    node: int
    """Which operator returned this tensor object, ``op << NODE_SHIFT | position``; -1 if none did."""


class OpNote(NamedTuple):
    """One recorded operator call."""

    func: Any
    inputs: tuple[TensorNote, ...]
    outputs: tuple[TensorNote, ...]
    args: tuple[object, ...]
    kwargs: tuple[tuple[str, object], ...]
    step: int
    phase: Phase
    module: str
    source: str
    start: int
    stop: int


class StorageNote:
    """One device storage; the role is settled after the run."""

    __slots__ = ("dtype", "module", "name", "nbytes", "op", "role", "shape")

    def __init__(self, nbytes: int, shape: tuple[int, ...], dtype: torch.dtype, op: int | None) -> None:
        self.nbytes = nbytes
        self.shape = shape
        self.dtype = dtype
        self.op = op
        self.role: Role | None = None
        self.name = ""
        self.module = ""


class _Life(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a live storage that knows the storage's index."""

    __slots__ = ("key", "sid")

    sid: int
    key: int


class Recorder(TorchDispatchMode):
    """Dispatch mode that runs every call on fake tensors and records it.

    Args:
        fake_mode: Makes the fake results; must allow non-fake inputs.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self.events: list[int] = []
        self.ops: list[OpNote] = []
        self.storages: list[StorageNote] = []
        self.step = 0
        self.step_starts: list[int] = []
        self.end: int | None = None
        self.phase = Phase.SETUP
        self.module_stack: list[str] = [""]
        self.factory_on_device = True
        """Where a factory call without tensor arguments allocates (set by the personality)."""
        self.place: bool | None = None
        """Where the results of the running call go, if its device argument says so."""
        self.notes: dict[str, None] = {}
        self.failed_in = ""
        """Path of the innermost module that raised."""
        self._lives: dict[int, _Life] = {}
        self._origin: dict[int, tuple[str, str]] = {}
        self._lines = SourceLines()
        self._busy = 0
        self._sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr

    # ------------------------------------------------------------- storages
    @property
    def busy(self) -> bool:
        """Whether a call is being computed, so that attribute reads come from torch itself."""
        return self._busy > 0

    def storage_index(self, tensor: torch.Tensor) -> int:
        """Index of the tensor's device storage, or ``HOST``."""
        life = self._lives.get(tensor.untyped_storage()._cdata)
        return life.sid if life is not None else HOST

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is on the device."""
        return tensor.layout is torch.strided and self.storage_index(tensor) != HOST

    def adopt(self, tensor: torch.Tensor, role: Role, name: str, module: str = "") -> int:
        """Put an existing tensor on the device, as ``tensor.to("cuda")`` would.

        Args:
            tensor: A parameter, buffer or input; copied densely, so it takes
                ``numel * itemsize`` bytes whatever storage it is a view of.

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

    def begin_step(self, step: int) -> None:
        """Start step 1, 2, ..."""
        self.step = step
        self.step_starts.append(len(self.events))

    def end_steps(self) -> None:
        """The loop has ended; what dies from here on is the recorder's own clean-up."""
        self.end = len(self.events)

    def name_gradients(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Mark the storages of the parameters' gradients."""
        for p in params:
            if p.grad is not None and p.grad.layout is torch.strided:
                self._name(p.grad, Role.GRADIENT, p)

    def name_optimizer_state(self, state: Mapping[Any, Any], params: Iterable[torch.nn.Parameter]) -> None:
        """Mark the storages that the optimizer keeps for each parameter."""
        for p in params:
            for tensor in tensors_in(dict(state.get(p, {}))):
                if tensor.layout is torch.strided:
                    self._name(tensor, Role.OPTIMIZER_STATE, p)

    def _name(self, tensor: torch.Tensor, role: Role, parameter: torch.Tensor) -> None:
        sid = self.storage_index(tensor)
        owner = self.storage_index(parameter)
        if sid != HOST and self.storages[sid].role is None:
            note = self.storages[sid]
            note.role = role
            if owner != HOST:
                note.name, note.module = self.storages[owner].name, self.storages[owner].module

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
        if self._lives.get(life.key) is life:
            del self._lives[life.key]
            if life.sid != HOST:
                self.events.append(~life.sid)

    # ------------------------------------------------------------- dispatch
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        tensors: list[torch.Tensor] = []
        plain_args = tuple([_note(a, tensors) for a in args])
        plain_kwargs = tuple([(k, _note(v, tensors)) for k, v in kwargs.items()]) if kwargs else ()
        notes = tuple([self._describe(t) for t in tensors])
        on_device = self._on_device(notes)
        start = len(self.events)
        self._busy += 1
        try:
            out = self._compute(func, types, args, kwargs, tensors)
        finally:
            self._busy -= 1
        if out is NotImplemented:
            return out
        donor = self._engine_sum(func, tensors, notes) if self.phase is Phase.BACKWARD else None
        outputs: list[TensorNote] = []
        if isinstance(out, torch.Tensor):
            outputs.append(self._result(out, 0, on_device, donor))
        elif isinstance(out, (tuple, list)):
            for i, item in enumerate(out):
                if isinstance(item, torch.Tensor):
                    outputs.append(self._result(item, i, on_device, None))
                elif isinstance(item, (tuple, list)):
                    outputs.extend(self._result(t, i, on_device, None) for t in item if isinstance(t, torch.Tensor))
        module, source = self._whence()
        self.ops.append(
            OpNote(
                func, notes, tuple(outputs), plain_args, plain_kwargs, self.step, self.phase, module, source,
                start, len(self.events),
            )
        )  # fmt: skip
        return out

    def _on_device(self, notes: tuple[TensorNote, ...]) -> bool:
        if self.place is not None:
            return self.place
        if notes:
            return any(n.storage != HOST for n in notes)
        return self.factory_on_device

    def _describe(self, t: torch.Tensor) -> TensorNote:
        if t.layout is not torch.strided:
            return TensorNote(HOST, tuple(t.shape), (), t.dtype, 0, -1)
        life = self._lives.get(t.untyped_storage()._cdata)
        return TensorNote(
            life.sid if life is not None else HOST, tuple(t.shape), t.stride(), t.dtype, t.storage_offset(),
            getattr(t, "_fxmem_node", -1),
        )  # fmt: skip

    def _result(
        self, t: torch.Tensor, position: int, on_device: bool, donor: torch.UntypedStorage | None
    ) -> TensorNote:
        op = len(self.ops)
        node = op << NODE_SHIFT | position
        if t.layout is not torch.strided:
            return TensorNote(HOST, tuple(t.shape), (), t.dtype, 0, node)
        storage = t.untyped_storage()
        life = self._lives.get(storage._cdata)
        if life is not None:
            sid = life.sid
        elif donor is not None:
            sid = self._hand_over(storage, donor)
        else:
            sid = HOST
            if on_device:
                sid = self._born(StorageNote(storage.nbytes(), tuple(t.shape), t.dtype, op))
            self._watch(storage, sid)
        t._fxmem_node = node  # type: ignore[attr-defined]
        return TensorNote(sid, tuple(t.shape), t.stride(), t.dtype, t.storage_offset(), node)

    def _hand_over(self, storage: torch.UntypedStorage, donor: torch.UntypedStorage) -> int:
        """Let ``storage`` take over the donor's index, whose death is then no longer an event."""
        sid = self._lives.pop(donor._cdata).sid
        self._watch(storage, sid)
        return sid

    # ------------------------------------------------------------- computing
    def _compute(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[Any]
    ) -> Any:
        fake = [t for t in tensors if isinstance(t, FakeTensor)]
        if not fake and self._computable(func, args, tensors):
            return func(*args, **kwargs)
        if len(fake) < len(tensors):
            args = tuple([self._shadow(a) for a in args])
            kwargs = {k: self._shadow(v) for k, v in kwargs.items()}
        try:
            out = self.fake_mode.dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._assume(func, args)
        if tensors and not isinstance(tensors[0], FakeTensor) and func._schema.is_mutable and out is not None:
            return _same_object(out, args, tensors[0])
        return out

    def _computable(self, func: Any, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> bool:
        """Whether a call without fake tensors may run for real: its result stays small."""
        if tensors:
            size = 1
            for t in tensors:
                size *= max(t.numel(), 1)
            return size <= REAL_LIMIT or max(t.numel() for t in tensors) * len(tensors) <= REAL_LIMIT and (
                len(tensors) == 1 or func.overloadpacket in _LINEAR
            )
        shape = args[0] if args and isinstance(args[0], (list, tuple, torch.Size)) else ()
        size = 1
        for n in shape:
            size *= int(n)
        return size <= REAL_LIMIT

    def _shadow(self, a: Any) -> Any:
        """The fake stand-in of a real tensor, made once per tensor object."""
        if isinstance(a, torch.Tensor):
            if isinstance(a, FakeTensor):
                return a
            shadow = getattr(a, "_fxmem_shadow", None)
            if shadow is None or shadow.shape != a.shape:
                shadow = self.fake_mode.from_tensor(a.detach())
                a._fxmem_shadow = shadow  # type: ignore[attr-defined]
            life = self._lives.get(a.untyped_storage()._cdata)
            inner = shadow.untyped_storage()
            if life is not None and inner._cdata not in self._lives:
                self._alias(inner, life.sid)
            return shadow
        if isinstance(a, (list, tuple)):
            return type(a)([self._shadow(x) for x in a]) if type(a) in (list, tuple) else a
        return a

    def _alias(self, storage: torch.UntypedStorage, sid: int) -> None:
        life = _Life(storage, self._forget)
        life.sid = sid
        life.key = storage._cdata
        self._lives[life.key] = life

    def _forget(self, life: Any) -> None:
        if self._lives.get(life.key) is life:
            del self._lives[life.key]

    def _assume(self, func: Any, args: tuple[Any, ...]) -> Any:
        """A documented default where values decide that no one knows without a run."""
        _, source = self._whence()
        name = func._schema.name.removeprefix("aten::")
        where = source or "the model"
        if name in ("_local_scalar_dense", "item"):
            self.notes[f"{where}: a value is read from a tensor; taken as 0"] = None
            return 0.0 if args[0].dtype.is_floating_point else (False if args[0].dtype is torch.bool else 0)
        if name in ("equal", "is_nonzero", "allclose"):
            self.notes[f"{where}: {name}() depends on values; taken as false"] = None
            return False
        if name == "nonzero":
            self.notes[f"{where}: nonzero() depends on values; taken as empty, what is selected is not counted"] = None
            return self.fake_mode.from_tensor(torch.empty(0, args[0].dim(), dtype=torch.int64))
        raise DataDependentError(
            f"aten.{name}: the shape of its result depends on the values of its input",
            where=source or None,
            hint="give these values as a small real input (inputs(batch) in model.py), or replace the operator",
        )

    # ------------------------------------------------------------- engine
    def _engine_sum(
        self, func: Any, tensors: list[torch.Tensor], notes: tuple[TensorNote, ...]
    ) -> torch.UntypedStorage | None:
        """The storage that the autograd engine would add into, if this call is such a sum.

        At a join the engine adds gradients up. It writes into the first gradient's buffer
        when nothing else holds it, but never for a tensor subclass, so a fake run shows an
        ``add`` out of place that a CUDA run does in place.
        Source: ``accumulate`` in torch/csrc/autograd/input_buffer.cpp.
        """
        if func is not aten.add.Tensor or len(tensors) != 2:
            return None
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        first = tensors[0]
        storage = first.untyped_storage()
        held = torch._C._storage_Use_Count(storage._cdata)
        if held > _OWNED_STORAGE or first._use_count() > _OWNED_TENSOR or notes[0].storage == HOST:
            return None
        return storage if _dense(first) else None

    def _whence(self) -> tuple[str, str]:
        """Module path and source line of the running call."""
        if self.phase is Phase.BACKWARD:
            node = torch._C._current_autograd_node()
            if node is not None:
                number = node._sequence_nr()
                origin = self._origin.get(number) if number < _TERMINAL else None
                if origin is not None:
                    return origin
            return self.module_stack[-1], self._lines.current()
        here = (self.module_stack[-1], self._lines.current())
        if self.phase is Phase.FORWARD:
            self._origin.setdefault(self._sequence_nr() - 1, here)
        return here


# Use counts that an exclusively held tensor shows inside __torch_dispatch__: the holder, the
# argument stack and the Python wrapper. Checked at import time on a tensor held by one name.
_OWNED_TENSOR = 4
_OWNED_STORAGE = 2

# Operators whose result is no larger than their inputs together.
_LINEAR = frozenset((aten.cat, aten.stack, aten.index_select, aten.gather, aten.where))


def _dense(t: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap."""
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _note(a: Any, tensors: list[torch.Tensor]) -> object:
    """``a`` as plain data; tensors are appended to ``tensors`` and become a ``Ref``."""
    if isinstance(a, torch.Tensor):
        tensors.append(a)
        return Ref(len(tensors) - 1)
    if isinstance(a, (list, tuple)):
        return tuple([_note(x, tensors) for x in a])
    return a


def _same_object(out: Any, args: tuple[Any, ...], real: torch.Tensor) -> Any:
    """The caller's own tensor where an in-place call on it was computed on its stand-in."""
    return real if out is args[0] else out


def tensors_in(tree: object) -> Iterable[torch.Tensor]:
    """Every tensor reachable in ``tree``: containers, dataclasses, and objects' attributes."""
    seen: set[int] = set()
    stack = [tree]
    while stack:
        item = stack.pop()
        if id(item) in seen or item is None or isinstance(item, (str, bytes, int, float, type)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, Mapping):
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack.extend(reversed(list(item)))
        elif hasattr(item, "__dict__") and not callable(item) and type(item) is not type(sys):
            stack.extend(reversed(list(vars(item).values())))
