"""Results that CUDA writes row-major, or in another order, where the fake kernel keeps the input's memory format.

Found by holding the strides of all results against PyTorch's on the phantom device (tests/torch_side/test_layout.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _row_major(op: Any) -> Callable[..., torch.Tensor]:
    """The operator's own shape, densely in row-major order."""

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = op(*args, **kwargs)
        return torch.empty(out.shape, dtype=out.dtype)

    return call


def _dropout_backward(grad: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:  # noqa: ARG001
    """``dropout_backward_cuda`` in aten/src/ATen/native/cuda/Dropout.cu asks the gradient for a memory format."""
    channels = grad.dim() in (4, 5) and not grad.is_contiguous() and _channels_last(grad)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return torch.empty(
        grad.shape, dtype=grad.dtype, memory_format=formats[grad.dim()] if channels else torch.contiguous_format
    )


def _channels_last(x: torch.Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)


def _log_sigmoid(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``log_sigmoid_forward_cuda`` in aten/src/ATen/native/cuda/Activation.cpp."""
    return torch.empty_like(x), torch.empty(0, dtype=x.dtype)


_ROW_MAJOR = [
    *(f"{kind}_pad{n}d{way}" for kind in ("reflection", "replication") for n in (1, 2, 3) for way in ("", "_backward")),
    "pixel_shuffle", "pixel_unshuffle", "native_channel_shuffle", "max_unpool2d", "max_unpool3d", "roll",
    "mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward",
]  # fmt: skip
"""ReflectionPad.cu, ReplicationPadding.cu, PixelShuffle.cpp, ChannelShuffle.cpp, MaxUnpooling.cu,
TensorTransformations.cu, Loss.cpp (``LEGACY_CONTIGUOUS_MEMORY_FORMAT``)."""

LAYOUT_SHAPES: dict[Any, Callable[..., Any]] = {
    aten.native_dropout_backward.default: _dropout_backward, aten.log_sigmoid_forward.default: _log_sigmoid,
    **{getattr(aten, name).default: _row_major(getattr(aten, name).default) for name in _ROW_MAJOR},
}  # fmt: skip
