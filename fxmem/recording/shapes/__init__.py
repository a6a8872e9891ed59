"""Shape functions of operators whose fake kernel follows the CPU where CUDA takes more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxmem.recording.shapes.attention import ATTENTION_SHAPES
from fxmem.recording.shapes.fft import FFT_SHAPES
from fxmem.recording.shapes.layout import LAYOUT_SHAPES
from fxmem.recording.shapes.loss import LOSS_SHAPES
from fxmem.recording.shapes.norm import NORM_SHAPES
from fxmem.recording.shapes.rnn import RNN_SHAPES

aten = torch.ops.aten


def _histc(x: torch.Tensor, bins: int = 100, *_: Any, **__: Any) -> torch.Tensor:
    """CUDA counts whole numbers too: aten/src/ATen/native/cuda/SummaryOps.cu."""
    return torch.empty(bins, dtype=x.dtype)


def _grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, _bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:  # fmt: skip
    """``create_grouped_gemm_output_tensor`` in aten/src/ATen/native/GroupedMMUtils.h.

    Any floating dtype on CUDA; the last dimension's rows begin at multiples of 16 bytes.
    """
    groups = offs.shape[0] if offs is not None else 0
    if a.dim() == 2 and b.dim() == 2:
        shape: tuple[int, ...] = (groups, a.shape[0], b.shape[1])
    elif a.dim() == 2 or b.dim() == 2:
        shape = (a.shape[-2], b.shape[-1])
    else:
        shape = (a.shape[0], a.shape[1], b.shape[-1])
    dtype = out_dtype or a.dtype
    alignment = 16 // torch.empty((), dtype=dtype, device="meta").element_size()
    row = -(-shape[-1] // alignment) * alignment
    stride = (row, 1) if len(shape) == 2 else (shape[1] * row, row, 1)
    return torch.empty_strided(shape, stride, dtype=dtype)


def _zero_tensor(size: Sequence[int], dtype: torch.dtype | None = None, **options: Any) -> torch.Tensor:
    """A tensor without memory (``ZeroTensor``); its fake kernel gives one on the meta device, which backward refuses.

    What a backward pass computes from it has memory here, where torch makes another one without.
    """
    if torch._C._current_autograd_node() is None:  # forward derivatives take it as it is
        out: torch.Tensor = aten._efficientzerotensor.default(size, dtype=dtype, **options)
        return out
    return torch.empty(size, dtype=dtype)


CUDA_SHAPES: dict[Any, Callable[..., Any]] = {
    aten.histc.default: _histc, aten._efficientzerotensor.default: _zero_tensor,
    **ATTENTION_SHAPES, **FFT_SHAPES, **LAYOUT_SHAPES, **LOSS_SHAPES,
    **NORM_SHAPES, **RNN_SHAPES,
}  # fmt: skip
if hasattr(aten, "_grouped_mm"):
    CUDA_SHAPES[aten._grouped_mm.default] = _grouped_mm
