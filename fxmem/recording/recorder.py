"""The recorder: runs each ATen call on fake tensors and writes down what it did.

One dispatch mode does both. It holds the ``FakeTensorMode`` and hands each call to it
directly, so a recorded run costs one trip through Python per operator, not two.
What it keeps of a tensor is plain data; no tensor or storage is kept alive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fxmem.recording.compute import Call, Compute
from fxmem.recording.ledger import HOST, NODE_SHIFT, Ledger, StorageNote, TensorNote
from fxmem.recording.numbering import Numbering
from fxmem.recording.plain import donor, owned, producer_of
from fxmem.recording.rewritten import RewrittenViews
from fxmem.recording.sourceline import SourceLines
from fxmem.release import RELEASE, Release
from fxmem.tape import Phase, Ref, Role

aten = torch.ops.aten

_TERMINAL = 1 << 62
"""Sequence numbers from here on belong to ``AccumulateGrad``, which has no forward operator."""

_SEED_AS_ZEROS: Release = (2, 13)
"""From here on memory-efficient attention without dropout makes seed and offset, zeros, on the device.

The 2.13.0 wheel itself does not yet (the phantom device shows it with 2.14.1).
"""

_ON_HOST: dict[Any, Callable[[tuple[Any, ...]], Collection[int]]] = {
    # the seed and offset of dropout
    aten._scaled_dot_product_efficient_attention.default: lambda args: (
        (2, 3) if RELEASE < _SEED_AS_ZEROS or (len(args) > 5 and args[5]) else ()
    ),
    # the same; from torch 2.7 on they are one state on the device
    aten._scaled_dot_product_flash_attention.default: lambda _: (6, 7) if RELEASE < (2, 7) else (),
    # the logarithms are made for a backward pass only
    aten._scaled_dot_product_cudnn_attention.default: lambda args: () if args[4] else (1,),
}
"""Results that eager CUDA keeps on the host or does not make, by operator and arguments."""

_SILENT = ("profiler::",)
"""Namespaces whose calls compute nothing."""


_CPU = torch.device("cpu")


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
    in_engine: bool


class Recorder(TorchDispatchMode):
    """Dispatch mode that runs every call on fake tensors and records it.

    Args:
        fake_mode: Makes the fake results; must allow non-fake inputs.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger()
        self.ops: list[OpNote] = []
        self.step = 0
        self.step_starts: list[int] = []
        self.end: int | None = None
        self.phase = Phase.SETUP
        self.module_stack: list[str] = [""]
        self.failed_in = ""
        """Path of the innermost module that raised."""
        self.factory_on_device = True
        """Where a factory call without tensor arguments allocates (set by the personality)."""
        self.place: bool | None = None
        """Where the results of the running call go, if its device argument says so."""
        self.notes: dict[str, None] = {}
        self.unmodelled: dict[str, None] = {}
        self._origin: dict[int, tuple[str, str]] = {}
        self._lines = SourceLines()
        self._busy = 0
        self._sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
        self.numbering = Numbering()
        self.rewritten = RewrittenViews(self.numbering)
        self._compute = Compute(fake_mode, self.ledger, self._lines.current, self.notes, self.unmodelled)

    @property
    def events(self) -> list[int]:
        """Births and deaths so far, as the tape has them."""
        return self.ledger.events

    @property
    def storages(self) -> list[StorageNote]:
        """The device storages so far."""
        return self.ledger.storages

    @property
    def busy(self) -> bool:
        """Whether a call is being computed, so that attribute reads come from torch itself."""
        return self._busy > 0

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is on the device."""
        return self.ledger.index(tensor) != HOST

    # ------------------------------------------------------------- the run's marks
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
            if p.grad is not None:
                self._name(p.grad, Role.GRADIENT, p)

    def name_optimizer_state(self, state: Mapping[Any, Any], params: Iterable[torch.nn.Parameter]) -> None:
        """Mark the storages that the optimizer keeps for each parameter."""
        for p in params:
            for tensor in tensors_in(dict(state.get(p, {}))):
                self._name(tensor, Role.OPTIMIZER_STATE, p)

    def _name(self, tensor: torch.Tensor, role: Role, parameter: torch.Tensor) -> None:
        sid = self.ledger.index(tensor)
        owner = self.ledger.index(parameter)
        if sid != HOST and self.storages[sid].role is None:
            note = self.storages[sid]
            note.role = role
            if owner != HOST:
                note.name, note.module = self.storages[owner].name, self.storages[owner].module

    # ------------------------------------------------------------- dispatch
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        kwargs = kwargs or {}
        if (asked := kwargs.get("device")) is not None and asked.type == "cuda":
            return self._asked_inside(func, types, args, kwargs)
        tensors: list[torch.Tensor] = []
        plain_args = tuple([_plain(a, tensors) for a in args])
        plain_kwargs = tuple([(k, _plain(v, tensors)) for k, v in kwargs.items()]) if kwargs else ()
        ledger = self.ledger
        notes = tuple([ledger.note(t) for t in tensors])
        start = len(ledger.events)
        self._busy += 1
        try:
            with torch._C.DisableTorchFunction():  # what torch reads of a tensor in here is not for the personality
                out = self._compute(Call(func, types, args, kwargs, tensors, notes, plain_args, plain_kwargs))
        finally:
            self._busy -= 1
        if out is NotImplemented or (not tensors and func._schema.name.startswith(_SILENT)):
            return out
        node: Any = torch._C._current_autograd_node()  # the engine also runs in a forward pass: torch.autograd.grad
        maker = None if node is None else self.numbering.number(node)
        self.rewritten.note(func, tensors)
        gradient = tensors[0] if self.rewritten.copies(maker, out, tensors) else None
        if gradient is not None:
            out = self._fresh(out)
        outputs = self._results(func, out, args, tensors, notes, maker)
        if gradient is not None and owned(gradient.untyped_storage()):
            ledger.end(gradient)  # autograd takes the copy for a view, and keeps the gradient as its base
        module, source = self._whence(maker)
        self.ops.append(
            OpNote(
                func, notes, outputs, plain_args, plain_kwargs, self.step, self.phase, module, source,
                start, len(ledger.events), maker is not None,
            )
        )  # fmt: skip
        return out

    def _fresh(self, like: torch.Tensor) -> torch.Tensor:
        with self._compute.fake_mode:
            return torch.empty(like.shape, dtype=like.dtype)

    def _asked_inside(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:  # fmt: skip
        """Torch's own Python asks for the device, as ``embedding_bag`` does, where the function mode is off."""
        before, self.place = self.place, True
        try:
            return self.__torch_dispatch__(func, types, args, {**kwargs, "device": _CPU})
        finally:
            self.place = before

    def _results(
        self, func: Any, out: Any, args: tuple[Any, ...], tensors: list[torch.Tensor], notes: tuple[TensorNote, ...],
        maker: int | None,
    ) -> tuple[TensorNote, ...]:  # fmt: skip
        op = len(self.ops)
        on_device = self._lands_on_device(notes)
        if isinstance(out, torch.Tensor):
            given = None
            if notes:
                made_by = producer_of(notes[0])
                made = self.ops[made_by].func if 0 <= made_by == op - 1 else None
                given = donor(func, tensors, notes, maker, self.storages, made)
            return (self.ledger.result(out, op << NODE_SHIFT, op, maker, on_device=on_device, donor=given),)
        if not isinstance(out, (tuple, list)):
            return ()
        on_host = _ON_HOST[func](args) if func in _ON_HOST else ()
        noted: list[TensorNote] = []
        for i, item in enumerate(out):
            for t in item if isinstance(item, (tuple, list)) else (item,):
                if isinstance(t, torch.Tensor):
                    place = on_device and i not in on_host
                    noted.append(self.ledger.result(t, op << NODE_SHIFT | i, op, maker, on_device=place))
        return tuple(noted)

    def _lands_on_device(self, notes: tuple[TensorNote, ...]) -> bool:
        if self.place is not None:
            return self.place
        if notes:
            return any(n.storage != HOST for n in notes)
        return self.factory_on_device

    def _whence(self, maker: int | None) -> tuple[str, str]:
        """Module path and source line of the running call; a backward node has its forward call's."""
        if maker is not None and maker < _TERMINAL:
            origin = self._origin.get(maker)
            if origin is not None:
                return origin
        here = (self.module_stack[-1], self._lines.current())
        if self.phase is Phase.FORWARD:
            self._origin.setdefault(self._sequence_nr() - 1, here)
        return here


def _plain(a: Any, tensors: list[torch.Tensor]) -> object:
    """``a`` as plain data; tensors are appended to ``tensors`` and become a ``Ref``."""
    if isinstance(a, torch.Tensor):
        tensors.append(a)
        return Ref(len(tensors) - 1)
    if isinstance(a, (list, tuple)):
        return tuple([_plain(x, tensors) for x in a])
    return a


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
