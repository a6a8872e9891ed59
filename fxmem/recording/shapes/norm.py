"""Shape functions of normalisations, whose statistics have other types and sizes on CUDA than on the CPU.

CUDA keeps statistics of half-precision inputs in float32 (``toAccumulateType``); cuDNN's batch normalisation
keeps none in evaluation; group normalisation returns dense results whatever the input's layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxmem.kernels.batch_norm import channels_last_kernels, uses_cudnn
from fxmem.kernels.steps import suggests_channels_last
from fxmem.tape import TensorMeta

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALVES else dtype


def _stats_shape(x: torch.Tensor, normalized: Sequence[int]) -> tuple[int, ...]:
    kept = x.dim() - len(normalized)
    return (*x.shape[:kept], *(1,) * len(normalized))


def _layer_norm(x: torch.Tensor, normalized: Sequence[int], *_: Any) -> tuple[torch.Tensor, ...]:
    """``layer_norm_cuda`` in aten/src/ATen/native/cuda/layer_norm_kernel.cu."""
    mean, rstd = (torch.empty(_stats_shape(x, normalized), dtype=_accumulator(x.dtype)) for _ in range(2))
    return torch.empty(x.shape, dtype=x.dtype), mean, rstd


def _rms_norm(x: torch.Tensor, normalized: Sequence[int], *_: Any) -> tuple[torch.Tensor, ...]:
    """``_fused_rms_norm_cuda`` in the same file."""
    return torch.empty(x.shape, dtype=x.dtype), torch.empty(_stats_shape(x, normalized), dtype=_accumulator(x.dtype))


def _rms_norm_backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """``_fused_rms_norm_backward_cuda`` in the same file."""
    _, x, _, _, weight, mask = args
    dx = torch.empty(x.shape, dtype=x.dtype) if mask[0] else None
    return dx, torch.empty(weight.shape, dtype=weight.dtype) if mask[1] and weight is not None else None


def _layer_norm_backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """``layer_norm_backward_cuda`` in the same file."""
    _, x, _, _, _, weight, bias, mask = args
    dx = torch.empty(x.shape, dtype=x.dtype) if mask[0] else None
    parameters = zip((weight, bias if bias is not None else weight), mask[1:], strict=True)
    return dx, *(torch.empty(p.shape, dtype=p.dtype) if wanted and p is not None else None for p, wanted in parameters)


def _batch_norm(*args: Any) -> tuple[torch.Tensor, ...]:
    """``batch_norm_cuda`` in cuda/Normalization.cu, ``cudnn_batch_norm`` in cudnn/BatchNorm.cpp."""
    x, weight, _, mean, _, training, *_ = args
    cudnn = takes_cudnn(x, weight, mean, training=training)
    size = 0 if cudnn and not training else x.shape[1]
    stats = [torch.empty(size, dtype=_accumulator(x.dtype)) for _ in range(2)]
    return torch.empty_like(x), *stats


def takes_cudnn(x: torch.Tensor, weight: torch.Tensor | None, mean: torch.Tensor | None, *, training: bool) -> bool:
    """Whether batch normalisation goes to cuDNN."""
    return uses_cudnn(
        str(x.dtype)[6:], str(weight.dtype)[6:] if weight is not None else None, x.shape,
        stats=mean is not None, training=training,
    )  # fmt: skip


def plain(x: torch.Tensor) -> TensorMeta:
    """A tensor as kernel rules see it."""
    return TensorMeta(-1, tuple(x.shape), tuple(x.stride()), str(x.dtype)[6:])


def _batch_norm_backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """``batch_norm_backward_cuda`` in cuda/Normalization.cu, ``cudnn_batch_norm_backward`` in cudnn/BatchNorm.cpp."""
    _, x, weight, mean, _, _, _, training, _, mask = args
    dx = None
    if mask[0]:
        kept = training and (takes_cudnn(x, weight, mean, training=True) or channels_last_kernels(plain(x)))
        dx = torch.empty(x.shape, dtype=x.dtype)
        if kept and x.dim() in (4, 5) and suggests_channels_last(plain(x)):
            dx = dx.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    dtype = weight.dtype if weight is not None else x.dtype
    return dx, *(torch.empty(x.shape[1], dtype=dtype) if wanted and weight is not None else None for wanted in mask[1:])


def _group_norm(*args: Any) -> tuple[torch.Tensor, ...]:
    """``native_group_norm`` in aten/src/ATen/native/group_norm.cpp."""
    x, _, _, n, _, _, groups, *_ = args
    return torch.empty(x.shape, dtype=x.dtype), *(torch.empty(n, groups, dtype=x.dtype) for _ in range(2))


def _group_norm_backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    """``native_group_norm_backward`` in the same file."""
    _, x, _, _, weight, _, c, _, _, mask = args
    dx = torch.empty(x.shape, dtype=x.dtype) if mask[0] else None
    dtype = weight.dtype if weight is not None else x.dtype
    return dx, *(torch.empty(c, dtype=dtype) if wanted else None for wanted in mask[1:])


NORM_SHAPES: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
    aten.native_group_norm.default: _group_norm,
    aten.native_group_norm_backward.default: _group_norm_backward,
}
if hasattr(aten, "_fused_rms_norm_backward"):
    NORM_SHAPES[aten._fused_rms_norm.default] = _rms_norm
    NORM_SHAPES[aten._fused_rms_norm_backward.default] = _rms_norm_backward
