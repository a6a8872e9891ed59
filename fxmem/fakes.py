"""Fake tensors that stand in for real ones: what has a shape, but no memory."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

REAL_LIMIT = 1 << 20
"""Elements up to which a tensor that is no parameter stays real. Large enough for what model
code reads back (a 1024 x 1024 causal mask, the relative positions of a 32 x 32 window), small
enough that a hundred of them cost neither time nor memory."""


def blank(source: Tensor, fake_mode: FakeTensorMode) -> Tensor:
    """A fake CPU tensor of the same shape and dtype, with a storage of its own.

    Strides are those that ``source.to(device)`` gives: kept if dense, else contiguous.
    """
    with _disable_current_modes():
        if source.layout != torch.strided:
            return fake_mode.from_tensor(source)
        strides = source.stride()
        if not source.is_contiguous():
            strides = torch.empty_like(source, device="meta").stride()
        with fake_mode:
            return torch.empty_strided(source.shape, strides, dtype=source.dtype, device="cpu")


def blank_parameter(
    source: Tensor, fake_mode: FakeTensorMode, requires_grad: bool, kind: type[Tensor] = nn.Parameter
) -> nn.Parameter:
    """A :func:`blank` tensor that is an ``nn.Parameter``, or a subclass of it."""
    fake: Any = blank(source, fake_mode)
    fake.requires_grad_(requires_grad)
    fake._is_param = True  # what nn.Parameter's isinstance looks at on tensor subclasses
    if kind is not nn.Parameter and issubclass(kind, nn.Parameter):
        fake.__class__ = _fake_kind(kind)
    parameter: nn.Parameter = fake
    return parameter


@functools.cache
def _fake_kind(kind: type[Tensor]) -> Any:
    meta: Any = type(kind)
    return meta(kind.__name__, (FakeTensor, kind), {"__module__": kind.__module__})


def stand_in(tensor: Any, fake_mode: FakeTensorMode) -> Any:
    """A copy that may be changed in the place of ``tensor``: real if that is real, small and no parameter."""
    if isinstance(tensor, nn.Parameter):
        copied: Any = blank_parameter(tensor, fake_mode, tensor.requires_grad, _kind(tensor))
    elif isinstance(tensor, FakeTensor) or tensor.numel() > REAL_LIMIT or tensor.device.type == "meta":
        copied = blank(tensor, fake_mode).requires_grad_(tensor.requires_grad)
    else:
        copied = tensor.detach().to("cpu", copy=True).requires_grad_(tensor.requires_grad)
    for name, value in vars(tensor).items():
        if name not in vars(copied):
            setattr(copied, name, value)
    for hook in list((tensor._backward_hooks or {}).values()):
        copied.register_hook(hook)
    for hook in list((tensor._post_accumulate_grad_hooks or {}).values()):
        copied.register_post_accumulate_grad_hook(hook)
    return copied


def _kind(parameter: Tensor) -> type[Tensor]:
    return nn.Parameter if type(parameter) is FakeTensor else type(parameter)


_GENERATOR = torch.Generator


class _GeneratorType(type(torch.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _GENERATOR)


class Generator(torch.Generator, metaclass=_GeneratorType):
    """Stands for ``torch.Generator``: one on the device is on the host, and says that it is on the device."""

    asked: torch.device

    def __new__(cls, device: object = "cpu") -> Generator:  # noqa: PYI034
        """Make one, wherever it is wanted."""
        made: Generator = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        made.asked = torch.device(device if isinstance(device, torch.device) else str(device))
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device that was asked for."""
        return self.asked
