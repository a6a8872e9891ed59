"""Runs one ATen call: for real where all values are known and small, else on fake tensors.

Small tensors whose values are known stay real and are computed for real, so that code which
asks for values (``.item()``, ``if mask.all()``) gets them. A call that mixes real and fake
tensors is fake; each real tensor has a fake stand-in for that, made once.
"""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

from fxmem.errors import DataDependentError
from fxmem.recording.ledger import Ledger, TensorNote
from fxmem.recording.memo import memo_of
from fxmem.recording.shapes import CUDA_SHAPES

aten = torch.ops.aten

REAL_LIMIT = 1 << 20
"""Elements up to which a result of known values stays real: large enough for position indices
and masks of long sequences, small enough to compute in microseconds."""

_LINEAR = frozenset((aten.cat, aten.stack, aten.index_select, aten.gather, aten.where))
"""Operators whose result is no larger than their inputs together."""

_KEEP_STRIDES = frozenset((aten.clone, aten._to_copy))

_NO_RESULT = frozenset(
    getattr(aten, name).default for name in ("_amp_foreach_non_finite_check_and_unscale_",) if hasattr(aten, name)
)
"""In-place operators on lists without a fake kernel: nothing to compute, nothing returned."""


_READS = ("_local_scalar_dense", "item")
_COMPARES = ("equal", "is_nonzero", "allclose")

_OF_ONE_TYPE = frozenset((aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default))

_ALL = "_fxmem_all"
"""Marks the results of ``all()``: programs ask for it where bad values are to be refused."""

_ALLS = frozenset((aten.all.default, aten.all.dim, aten.all.dims, aten._is_all_true.default))

_CHECKERS = ("torch.distributions",)
"""Modules of torch that raise if a comparison does not hold."""


class Call(NamedTuple):
    """One ATen call: as torch makes it, and the same as plain data."""

    func: Any
    types: Sequence[type]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tensors: list[torch.Tensor]
    """All tensors among the arguments."""
    notes: tuple[TensorNote, ...]
    """The tensors as noted."""
    plain_args: tuple[Any, ...]
    plain_kwargs: tuple[Any, ...]


class Compute:
    """Decides for each call how it runs, and what to assume where values are not known.

    Args:
        fake_mode: Makes the fake results; must allow non-fake inputs.
        ledger: Knows which storage a stand-in speaks for.
        whence: The user's line, for messages.
        notes: What had to be assumed is added here as a key.
        unmodelled: Likewise what is missing from the figures for it.
    """

    def __init__(
        self, fake_mode: FakeTensorMode, ledger: Ledger, whence: Callable[[], str], notes: dict[str, None],
        unmodelled: dict[str, None],
    ) -> None:  # fmt: skip
        self.fake_mode = fake_mode
        self.ledger = ledger
        self.whence = whence
        self.notes = notes
        self.unmodelled = unmodelled
        self.memo = memo_of(fake_mode)

    def __call__(self, call: Call) -> Any:
        """Run the call and give its result."""
        out = self._result(call)
        if call.func in _ALLS and isinstance(out, FakeTensor):
            setattr(out, _ALL, True)
        return out

    def _result(self, call: Call) -> Any:
        if call.func in _OF_ONE_TYPE:
            _check_types(call)
        func, tensors = call.func, call.tensors
        fake = sum([isinstance(t, FakeTensor) for t in tensors])
        if not fake and func not in CUDA_SHAPES and _computable(func, call.args, tensors):
            try:
                return func(*call.args, **call.kwargs)
            except RuntimeError:  # the CPU has no such kernel: fake attention, or fail there as well
                if not tensors:
                    raise
        if func in _NO_RESULT:
            return None
        if fake < len(tensors):
            return self._laid_out(call, self._mixed(call))
        key = self.memo.key(func, call.notes, call.plain_args, call.plain_kwargs)
        if key is not None:
            known, out = self.memo.known(key, tensors)
            if known:
                return out
        out = self._laid_out(call, self._faked(func, call.types, call.args, call.kwargs))
        if key is not None and tensors and out is not NotImplemented:
            self.memo.learn(key, func, tensors, out)
        return out

    def _mixed(self, call: Call) -> Any:
        """Compute on stand-ins; an in-place call returns the caller's own tensor."""
        if call.func is aten.embedding.default:
            self._check_rows(*call.args[:2])
        given = _by_known_masks(call.args) if call.func is aten.index.Tensor else call.args
        args = tuple([self._stand_in(a) for a in given])
        kwargs = {k: self._stand_in(v) for k, v in call.kwargs.items()}
        out = self._faked(call.func, call.types, args, kwargs)
        first = call.tensors[0]
        if not isinstance(first, FakeTensor) and call.func._schema.is_mutable and out is args[0]:
            return first
        return out

    def _check_rows(self, weight: torch.Tensor, indices: torch.Tensor) -> None:
        """Positions beyond a table's end: a GPU's kernel asserts, a fake one does not look."""
        if isinstance(indices, FakeTensor) or not indices.numel():
            return
        highest, rows = int(indices.max()), weight.shape[0]
        if highest >= rows:
            where = self.whence() or "the model"
            self.notes[f"{where}: index {highest} in an embedding of {rows} rows: a GPU stops here"] = None

    def _faked(self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        shape = CUDA_SHAPES.get(func)
        if shape is not None:
            with self.fake_mode:
                return shape(*args, **kwargs)
        try:
            return self.fake_mode.dispatch(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._assume(func, args)

    def _laid_out(self, call: Call, out: Any) -> Any:
        """A pointwise result as TensorIterator lays it out: contiguous where all operands may be called so.

        ``compute_fast_setup_type`` in aten/src/ATen/TensorIterator.cpp ignores strides of dimensions of size one; fake
        tensors keep them, and a 1 x 1 image is then taken for a channels-last one.
        """
        if not isinstance(out, torch.Tensor) or out.dim() < 4 or not _iterates(call.func):
            return out
        if out.is_contiguous() and out.stride() != _dense_strides(out.shape):
            operands = [a for a, arg in zip(call.args, call.func._schema.arguments, strict=False) if _is_tensor(arg)]
            if all(isinstance(t, torch.Tensor) and t.shape == out.shape and t.is_contiguous() for t in operands):
                with self.fake_mode:
                    return torch.empty(out.shape, dtype=out.dtype)
        return out

    def _stand_in(self, a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            if isinstance(a, FakeTensor):
                return a
            stand_in = getattr(a, "_fxmem_stand_in", None)
            if stand_in is None or stand_in.shape != a.shape or stand_in.fake_mode is not self.fake_mode:
                stand_in = self.fake_mode.from_tensor(a.detach())
                a._fxmem_stand_in = stand_in  # type: ignore[attr-defined]
            self.ledger.alias(stand_in.untyped_storage(), a)
            return stand_in
        if type(a) in (list, tuple):
            return type(a)([self._stand_in(x) for x in a])
        return a

    def _assume(self, func: Any, args: tuple[Any, ...]) -> Any:
        """A documented default where values decide that no one knows without a run."""
        source = self.whence()
        name = func._schema.name.removeprefix("aten::")
        where = source or "the model"
        if (name in _COMPARES or getattr(args[0], _ALL, False)) and _must_hold():
            return True
        if name in _READS:
            self.notes[f"{where}: a value is read from a tensor; taken as 0"] = None
            return 0.0 if args[0].dtype.is_floating_point else (False if args[0].dtype is torch.bool else 0)
        if name in _COMPARES:
            self.notes[f"{where}: {name}() depends on values; taken as false"] = None
            return False
        if name == "bincount" and len(args) > 2 and args[2]:
            self.notes[f"{where}: bincount() depends on values; taken as no longer than its minlength"] = None
            with self.fake_mode:
                return torch.empty(args[2], dtype=torch.int64 if args[1] is None else torch.float64)
        empty = self._selected_nothing(name, args)
        if empty is not None:
            self.unmodelled[f"{where}: what {name}() selects depends on values; taken as nothing"] = None
            return empty
        raise DataDependentError(
            f"aten.{name}: the shape of its result depends on the values of its input",
            where=source or None,
            hint="give these values as a small real input (inputs(batch) in model.py), or replace the operator",
        )

    def _selected_nothing(self, name: str, args: tuple[Any, ...]) -> Any:
        """The result of a selection by value that finds nothing, ``None`` for other operators."""
        x = args[0]
        with self.fake_mode:
            if name == "nonzero":
                return torch.empty(0, x.dim(), dtype=torch.int64)
            if name == "masked_select":
                return torch.empty(0, dtype=x.dtype)
            if name in ("_unique2", "unique_dim", "unique_consecutive"):
                whole = torch.empty(x.shape, dtype=torch.int64)
                return torch.empty(0, dtype=x.dtype), whole, torch.empty(0, dtype=torch.int64)
            if name == "torchvision::nms":
                return torch.empty(0, dtype=torch.int64)
            if name == "index":
                indices: list[Any] = []
                for index in args[1]:
                    by_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
                    none = torch.empty(0, dtype=torch.int64)
                    indices += [none] * index.dim() if by_mask else [index]
                return aten.index.Tensor(x, indices)
        return None


def _check_types(call: Call) -> None:
    """What CUDA's matrix products refuse, and fake ones do not."""
    first, second = call.tensors[-2:]
    if first.dtype is not second.dtype:
        names = [str(t.dtype).removeprefix("torch.") for t in (first, second)]
        raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {names[0]} != {names[1]}")


def _must_hold() -> bool:
    """Whether the program stops if what it reads now is false.

    That is an ``assert``, an ``if`` before a ``raise``, or torch's own look at the arguments of a distribution.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (name := frame.f_globals.get("__name__", "")).startswith(("torch", "fxmem")):
        if name.startswith(_CHECKERS):
            return True
        frame = frame.f_back
    if frame is None:
        return False
    file, number = frame.f_code.co_filename, frame.f_lineno
    line, following = (linecache.getline(file, number + n, frame.f_globals).strip() for n in (0, 1))
    return line.startswith("assert ") or (line.startswith("if ") and following.startswith("raise "))


def _by_known_masks(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of an indexing with masks of known values as numbers: how many are selected is known then."""
    indices: list[Any] = []
    for index in args[1]:
        known = isinstance(index, torch.Tensor) and not isinstance(index, FakeTensor)
        by_mask = known and index.dtype in (torch.bool, torch.uint8)
        indices += index.nonzero().unbind(1) if by_mask else [index]
    return args[0], indices


def _computable(func: Any, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> bool:
    """Whether a call without fake tensors may run for real: its result stays small, or takes no memory.

    A view must look at the real memory whatever its size (``expand``): a view of the stand-in would not keep it alive.
    """
    if not tensors:
        shape = args[0] if args and isinstance(args[0], (list, tuple, torch.Size)) else ()
        return _product([int(n) for n in shape]) <= REAL_LIMIT
    if len(tensors) == 1 and _views(func):
        return True
    counts = [t.numel() for t in tensors]
    if _product(counts) <= REAL_LIMIT:
        return True
    if torch.Tag.pointwise in func.tags and max(counts) <= REAL_LIMIT:
        return _product(list(torch.broadcast_shapes(*[t.shape for t in tensors]))) <= REAL_LIMIT
    return (len(counts) == 1 or func.overloadpacket in _LINEAR) and max(counts) * len(counts) <= REAL_LIMIT


@functools.cache
def _iterates(func: Any) -> bool:
    """Whether the operator is pointwise in TensorIterator, with no number for an operand (that is then a tensor)."""
    schema = func._schema
    numbers = schema.overload_name.startswith("Scalar")
    return torch.Tag.pointwise in func.tags and not (
        schema.is_mutable or numbers or func.overloadpacket in _KEEP_STRIDES
    )


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) == "Tensor"


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


@functools.cache
def _views(func: Any) -> bool:
    """Whether the results are views of an argument that is not written to."""
    aliases = [result.alias_info for result in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _product(numbers: list[int]) -> int:
    product = 1
    for n in numbers:
        product *= max(n, 1)
    return product
