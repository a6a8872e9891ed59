"""Models without weights: the scope in which a user's factory runs.

Parameters become fake when they are created, whatever their size; other tensors stay real while
they are small, because model code reads their values (drop-path rates, position indices).
Initialisers do nothing, nothing large is ever allocated, and an accelerator is taken for the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from fxmem.borrowing import borrowed
from fxmem.fakes import REAL_LIMIT, Generator, blank, blank_parameter, stand_in

__all__ = ["REAL_LIMIT", "Devices", "borrowed", "building"]

RANDOM_LIMIT = 1 << 16
"""The same for random values: nobody reads many of them, and they take 10 ns each to draw."""

_CPU = torch.device("cpu")
_RANDOM = frozenset({"rand", "randn", "normal", "rand_like", "randn_like"})
_RANDOM_IN_PLACE = frozenset({"normal_", "uniform_", "cauchy_", "exponential_", "log_normal_", "geometric_"})
_REWIRING = frozenset({"set_", "resize_", "resize_as_"})  # in-place, but they change more than values


class _Dispatch(TorchDispatchMode):
    """Decides for each ATen call whether it runs for real, on fake tensors, or not at all."""

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode = fake_mode

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
        if not tensors:
            return self._factory(func, args, kwargs)
        fake = any(isinstance(t, FakeTensor) for t in tensors)
        if _writes(func):
            return self._in_place(func, args, kwargs, fake)
        limit = _limit(func)
        if fake or any(t.numel() > limit and t.device == _CPU for t in tensors):
            return self._fake(func, args, kwargs)
        if not _is_view(func) and _bound(tensors, args, kwargs) > limit and self._too_large(func, args, kwargs, limit):
            return self._fake(func, args, kwargs)
        return func(*args, **kwargs)

    def _factory(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        limit = _limit(func)
        if args and isinstance(args[0], (list, tuple)):  # a size: empty, zeros, full, rand, ...
            if math.prod(args[0]) <= limit:
                return func(*args, **kwargs)
            return self._fake(func, args, kwargs)
        if self._too_large(func, args, kwargs, limit):
            return self._fake(func, args, kwargs)
        return func(*args, **kwargs)

    def _in_place(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], fake: bool) -> Any:
        if fake:  # no values to change; a real tensor that takes fake ones keeps what it has
            return args[0] if func._schema.returns else None
        if func._schema.name[6:] in _RANDOM_IN_PLACE and args[0].numel() > RANDOM_LIMIT:
            return args[0].zero_()
        return func(*args, **kwargs)

    def _fake(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self._faked, (args, dict(kwargs)))
        return self.fake_mode.dispatch(func, (), args, kwargs)

    def _faked(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake_mode.from_tensor(tensor)

    def _too_large(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], limit: int) -> bool:
        try:
            out = self._fake(func, args, kwargs)
        except (DynamicOutputShapeException, NotImplementedError, RuntimeError):
            return False  # its real run says what is wrong, or has a size that depends on values
        return any(isinstance(t, Tensor) and t.numel() > limit for t in pytree.tree_leaves(out))


def _limit(func: Any) -> int:
    return RANDOM_LIMIT if func._schema.name[6:] in _RANDOM else REAL_LIMIT  # [6:]: without "aten::"


@functools.cache
def _writes(func: Any) -> bool:
    """Whether it only changes its first argument's values."""
    schema = func._schema
    first = schema.arguments[0].alias_info if schema.arguments else None
    if first is None or not first.is_write or torch.Tag.inplace_view in func.tags:
        return False
    return schema.name.rpartition("::")[2] not in _REWIRING


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether its result shares its argument's storage, so that nothing is allocated."""
    return any(r.alias_info is not None for r in func._schema.returns)


def _bound(tensors: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Elements that no output exceeds: broadcasting multiplies tensors, repeats multiply by integers."""
    bound = math.prod(max(t.numel(), 1) for t in tensors)
    for leaf in pytree.arg_tree_leaves(*args, **kwargs):
        if type(leaf) is int and leaf > 1:
            bound *= leaf
    return bound


class Devices(TorchFunctionMode):
    """Takes every accelerator for the CPU, and notes which tensors were asked for on the host."""

    def __init__(self) -> None:
        super().__init__()
        self._host: Any = WeakIdKeyDictionary()

    def on_host(self, tensor: Tensor) -> bool:
        """Whether it was made with an explicit ``device="cpu"``, or only from such tensors."""
        return tensor in self._host

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.data.__set__ and isinstance(args[0], FakeTensor):  # type: ignore[attr-defined]
            return func(args[0], _as_fake(args[1], args[0].fake_mode))
        wanted, args = _redirect(func, args, kwargs)
        stays = func is torch.Tensor.cuda or func is torch.Tensor.pin_memory
        out = args[0] if stays else func(*args, **kwargs)
        if isinstance(out, Tensor) and (wanted is not None or self._host):
            out = self._noted(out, args, wanted)
        return out

    def _noted(self, out: Tensor, args: tuple[Any, ...], wanted: str | None) -> Tensor:
        if wanted is None:
            sources = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
            if sources and all(x in self._host for x in sources):
                self._host[out] = True
        elif wanted == "cpu":
            self._host[out] = True
        elif out in self._host:  # host.cuda(): a copy elsewhere, not the same tensor
            return out.clone()
        return out


def _as_fake(tensor: Tensor, fake_mode: FakeTensorMode) -> Tensor:
    return tensor if isinstance(tensor, FakeTensor) else blank(tensor, fake_mode)


def _redirect(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str | None, tuple[Any, ...]]:
    """The device type that the call names, and its arguments with the CPU in its place."""
    wanted = None
    kwargs.pop("pin_memory", None)
    if func is torch.Tensor.cuda:
        wanted = "cuda"
    elif func is torch.Tensor.cpu:
        wanted = "cpu"
    elif kwargs.get("device") is not None:
        wanted = _device_type(kwargs["device"])
        kwargs["device"] = wanted if wanted in ("cpu", "meta") else "cpu"
    elif func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], (str, int, torch.device)):
        wanted = _device_type(args[1])
        args = (args[0], wanted if wanted in ("cpu", "meta") else "cpu", *args[2:])
    return wanted, args


def _device_type(device: object) -> str:
    return "cuda" if isinstance(device, int) else str(device).partition(":")[0]


@contextlib.contextmanager
def building(fake_mode: FakeTensorMode) -> Iterator[Devices]:
    """Scope in which a model, or its inputs, are made without weights.

    Args:
        fake_mode: Owns every fake tensor made; it must not be active.

    Yields:
        What tells tensors that the user keeps on the host.
    """
    devices = Devices()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_patched(nn.Parameter, "__new__", staticmethod(_parameter_new(fake_mode))))
        stack.enter_context(_patched(nn.Module, "_apply", _apply(nn.Module._apply)))
        stack.enter_context(_patched(FakeTensor, "__deepcopy__", _deepcopy))
        stack.enter_context(_patched(torch, "Generator", Generator))
        stack.enter_context(_patched(parametrizations, "_is_orthogonal", lambda *_, **__: True))
        for name, init in list(vars(nn.init).items()):
            if name.endswith("_") and not name.startswith("_") and callable(init):
                stack.enter_context(_patched(nn.init, name, _unless_fake(init)))
        stack.enter_context(devices)
        stack.enter_context(_Dispatch(fake_mode))
        yield devices


_ABSENT = object()


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: object) -> Iterator[None]:
    old = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if old is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, old)


def _parameter_new(fake_mode: FakeTensorMode) -> Callable[..., Tensor]:
    def new(cls: type[Tensor], data: Tensor | None = None, requires_grad: bool = True) -> Tensor:
        source = torch.empty(0) if data is None else data
        return blank_parameter(source, fake_mode, requires_grad, cls)

    return new


def _unless_fake(init: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(init)
    def wrapped(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        return tensor if isinstance(tensor, FakeTensor) else init(tensor, *args, **kwargs)

    return wrapped


def _apply(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """``Module._apply`` that changes fake parameters in place, as it does real ones.

    torch's own makes new parameters of them, which would untie tied weights.
    """

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        table: dict[str, Any] = self._parameters
        fakes = {name: p for name, p in table.items() if isinstance(p, FakeTensor)}
        for name, parameter in fakes.items():
            with torch.no_grad():
                applied = fn(parameter)
            if applied is not parameter:
                parameter.data = applied
            table[name] = None
        try:
            return original(self, fn, recurse)
        finally:
            table.update(fakes)

    return apply


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy`` of a fake tensor; torch's own would copy the fake mode with it."""
    if id(self) not in memo:
        copied = stand_in(self, self.fake_mode)
        memo[id(self)] = copied
    return memo[id(self)]
