"""Normalisations that CUDA composes otherwise than the CPU: root mean square, and batches on cuDNN.

On the CPU ``_fused_rms_norm`` is a composition of elementwise operators
(``rms_norm_composite`` in aten/src/ATen/native/layer_norm.cpp). On CUDA it is one kernel with a
backward of its own (tools/autograd/derivatives.yaml), which keeps the input and ``rstd``; torch has
it from 2.9 on. Batch normalisation on cuDNN reads, and keeps, a dense copy of an input that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxmem.kernels.steps import suggests_channels_last
from fxmem.recording.shapes.norm import plain, takes_cudnn

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
    y, rstd = _RMSNorm.apply(x, shape, weight, eps)
    return y, rstd


def batch_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, mean: torch.Tensor | None, *rest: Any
) -> torch.Tensor:
    """``_batch_norm_impl_index`` in aten/src/ATen/native/Normalization.cpp: cuDNN's input is made dense before."""
    var, training, momentum, eps, cudnn_enabled = rest
    if cudnn_enabled and takes_cudnn(x, weight, mean, training=training):
        channels_last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        x = x.contiguous(memory_format=channels_last if suggests_channels_last(plain(x)) else torch.contiguous_format)
    result: torch.Tensor = aten._batch_norm_impl_index(x, weight, bias, mean, var, training, momentum, eps, False)[0]
    return result


def register_normalization(library: Any) -> None:
    """Install the overrides, each where this torch has the operator."""
    library.impl("batch_norm", batch_norm, "AutogradCPU")
    if hasattr(aten, "_fused_rms_norm_backward"):
        library.impl("_fused_rms_norm", fused_rms_norm, "AutogradCPU")
