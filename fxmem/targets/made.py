"""What a target is made into: the values that loaders hand to :mod:`fxmem.source`."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxmem.errors import InputError


class Arguments(NamedTuple):
    """What the model is called with, and what the loss compares with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A module without weights, as its loader found it."""

    module: nn.Module
    name: str
    inputs: Callable[[int], object] | None = None
    """The user's ``inputs(batch)``."""
    loss: Callable[[Any], Tensor] | None = None
    steps: Callable[[int], object] | None = None
    """The user's ``steps(batch)``: inputs of each step, where they differ."""
    scope: Callable[[], AbstractContextManager[object]] = field(default=contextlib.nullcontext)
    """In which the user's code must run: its folder importable, its modules known."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of that name.

    Raises:
        InputError: torch has none.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"{name!r} is no dtype of torch", hint="for example float32, bfloat16, int64, bool")
    return dtype


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Scope in which new floating tensors have this dtype."""
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


def nearest(name: str, known: Iterable[str]) -> str:
    """``did you mean ...?``, or an empty string if nothing is near."""
    close = difflib.get_close_matches(name, list(known), n=4, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else ""
