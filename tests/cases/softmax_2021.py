"""Softmax as autograd knew it until torch 1.10: it saved its input beside its output, for the input's dtype.

Measured with torch 1.5.1 and 1.10.2 (a freed input's memory stays) against 1.13.1 (it goes).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, log: bool) -> Tensor:
        result = torch.log_softmax(x, -1) if log else torch.softmax(x, -1)
        ctx.log = log
        ctx.save_for_backward(result, x)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        result, x = ctx.saved_tensors
        backward = torch.ops.aten._log_softmax_backward_data if ctx.log else torch.ops.aten._softmax_backward_data
        return backward(grad, result, -1, x.dtype), None


def log_softmax(x: Tensor) -> Tensor:
    """Along the last dimension."""
    return _Softmax.apply(x, True)


@contextlib.contextmanager
def attention_saves_scores() -> Iterator[None]:
    """Scope in which ``functional.softmax`` is that of then."""
    today = functional.softmax

    def softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None, **_: object) -> Tensor:
        return _Softmax.apply(x if dtype is None else x.to(dtype), False)

    functional.softmax = softmax
    try:
        yield
    finally:
        functional.softmax = today
