"""Root-mean-square normalisation as one operator, as CUDA has it from torch 2.9 on.

On the CPU ``_fused_rms_norm`` is a composition of elementwise operators
(``rms_norm_composite`` in aten/src/ATen/native/layer_norm.cpp). On CUDA it is one kernel with a
backward of its own (tools/autograd/derivatives.yaml), which keeps the input and ``rstd``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

aten = torch.ops.aten


class _RMSNorm(torch.autograd.Function):
    """The forward and backward operator pair."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            y, rstd = aten._fused_rms_norm.default(x, shape, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape = shape
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, rstd

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, rstd = ctx.saved_tensors
        if grads[0] is None:
            return None, None, None, None
        mask = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        dx, dweight = aten._fused_rms_norm_backward.default(grads[0], x, ctx.shape, rstd, weight, mask)
        return dx, None, dweight, None


def fused_rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for ``_fused_rms_norm`` under ``AutogradCPU``."""
    y, rstd = _RMSNorm.apply(x, shape, weight, eps)  # type: ignore[no-untyped-call]
    return y, rstd


def register_normalization(library: torch.library.Library) -> None:
    """Install the override, where this torch has the operator."""
    if hasattr(aten, "_fused_rms_norm_backward"):
        library.impl("_fused_rms_norm", fused_rms_norm, "AutogradCPU")
