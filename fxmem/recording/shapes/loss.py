"""Shape functions of losses: of some, the reduced result keeps the memory of the unreduced one on CUDA.

``resize_`` to a scalar does not give memory back, so such a loss holds as much as its input as
long as it lives. The fake kernels return a scalar of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def _reduced(unreduced: torch.Tensor, reduction: int) -> torch.Tensor:
    if reduction == 0:
        return unreduced
    return torch.empty(unreduced.numel(), dtype=unreduced.dtype).resize_(())


def _binary(a: torch.Tensor, b: torch.Tensor, reduction: int = 1, *_: Any, **__: Any) -> torch.Tensor:
    """``mse_loss``, ``smooth_l1_loss``: the structured kernels' meta functions in aten/src/ATen/native/Loss.cpp."""
    return _reduced(torch.add(a, b), reduction)


def _cross_entropy(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, reduction: int = 1  # noqa: ARG001
) -> torch.Tensor:  # fmt: skip
    """``binary_cross_entropy_out_cuda`` in aten/src/ATen/native/cuda/Loss.cu."""
    return _reduced(torch.empty_like(x), reduction)


def _soft_margin(x: torch.Tensor, target: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    """``soft_margin_loss_out`` in aten/src/ATen/native/Loss.cpp."""
    return _reduced(torch.mul(target, x), reduction)


def _ctc(
    log_probs: torch.Tensor, targets: torch.Tensor, _inputs: Sequence[int], lengths: Sequence[int], *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``ctc_loss_gpu_template`` in native/cuda/LossCTC.cu: as wide as the targets' rows, or the longest one."""
    steps, batch = log_probs.shape[:2]
    longest = targets.shape[1] if targets.dim() == 2 else max(lengths, default=0)
    dtype = log_probs.dtype
    return torch.empty(batch, dtype=dtype), torch.empty(batch, steps, 2 * longest + 1, dtype=dtype)


def _ctc_backward(grad: torch.Tensor, log_probs: torch.Tensor, *_: Any) -> torch.Tensor:  # noqa: ARG001
    """``ctc_loss_backward_gpu_template`` there."""
    return torch.empty_like(log_probs)


LOSS_SHAPES: dict[Any, Callable[..., Any]] = {
    aten.mse_loss.default: _binary,
    aten.smooth_l1_loss.default: _binary,
    aten.binary_cross_entropy.default: _cross_entropy,
    aten.soft_margin_loss.default: _soft_margin,
    aten._ctc_loss.default: _ctc,
    aten._ctc_loss_backward.default: _ctc_backward,
}
