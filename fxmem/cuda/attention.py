"""Scaled dot-product attention: the back end that the target GPU would choose, and its calls.

The rules are those of ``select_sdp_backend`` and ``can_use_*`` in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (pytorch 001f694a) and
sdp_utils_cpp.h; the calls are those of ``scaled_dot_product_attention`` in
aten/src/ATen/native/transformers/attention.cpp. What earlier releases do otherwise
was seen on the phantom device, with tests/attention_cases.py.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fxmem.release import RELEASE, Release

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_CUDNN_DIM = 65535
_LEAST_CUDNN_BIAS = -65504.0
"""``convert_boolean_attn_mask_cudnn``: cuDNN does not take minus infinity."""


_FOR_BLACKWELL: Release = (2, 7)
_CUDNN_FIRST: Release = (2, 11)
_CUDNN_SIXTEENTHS: Release = (2, 12)
"""Dropout that is no multiple of 1/16 does not go to cuDNN any more."""
_EFFICIENT_OFFSETS: Release = (2, 13)
"""Memory-efficient attention looks at where in their storage the inputs begin."""
_SHARED_HEADS: Release = (2, 13)
"""Grouped heads in memory-efficient attention, one head of keys for all without ``enable_gqa``, inputs without a batch.

The 2.13.0 wheel itself does not have these yet (the phantom device has them with 2.14.1, pytorch/pytorch#191085).
"""


class Backend(enum.IntEnum):
    """``at::SDPBackend``."""

    MATH = 0
    FLASH = 1
    EFFICIENT = 2
    CUDNN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One call of ``scaled_dot_product_attention``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    gqa: bool
    sm: int
    release: Release = RELEASE

    @property
    def trains(self) -> bool:
        """``input_requires_grad``."""
        tensors = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _order(a: Attention) -> list[Backend]:
    """``priority_order``: cuDNN first on sm_90 and sm_100, unless user code set an order."""
    current = [Backend(i) for i in torch._C._get_sdp_priority_order() if i in Backend._value2member_map_]
    untouched = current[:3] == [Backend.FLASH, Backend.EFFICIENT, Backend.MATH]
    if untouched and a.sm // 10 in (9, 10) and a.release >= _CUDNN_FIRST:
        return [Backend.CUDNN, Backend.FLASH, Backend.EFFICIENT, Backend.MATH]
    return current


def _newest(a: Attention) -> int:
    """The latest architecture that fused kernels of torch's own serve."""
    return 121 if a.release >= _FOR_BLACKWELL else 90


def _heads_fit(a: Attention, *, same_heads: bool) -> bool:
    """``check_batch_size_and_num_heads_dense`` with grouped and multi query supported."""
    q, k, v = a.query.shape, a.key.shape, a.value.shape
    if not q[0] == k[0] == v[0]:
        return False
    hq, hk, hv = q[-3], k[-3], v[-3]
    if a.gqa:
        if same_heads and hk != hv:
            return False
        return hq % hk == 0 and (same_heads or hq % hv == 0)
    return hq == hk == hv or (hq > 0 and hk == 1 and hv == 1 and a.release >= _SHARED_HEADS)


def _last_strides_fit(a: Attention, *, ignore_single: bool) -> bool:
    tensors = (a.query, a.key, a.value)
    fit = all(t.stride(-1) == 1 for t in tensors) or (ignore_single and a.query.shape[-1] == 1)
    return fit and (a.mask is None or a.mask.stride(-1) == 1)


def _four_dimensional(a: Attention) -> bool:
    return a.query.dim() == a.key.dim() == a.value.dim() == 4


def _not_empty(a: Attention) -> bool:
    return a.query.shape[-2] != 0 and a.key.shape[-2] != 0


def _same_dtype(a: Attention, allowed: tuple[torch.dtype, ...]) -> bool:
    return a.query.dtype == a.key.dtype == a.value.dtype and a.query.dtype in allowed


def _low_precision(a: Attention) -> bool:
    return _same_dtype(a, _HALF if a.sm >= 80 else (torch.float16,))


def _mask_fits(a: Attention) -> bool:
    """``check_attn_mask_shape``."""
    mask = a.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    wanted = (a.query.shape[0], a.query.shape[1], a.query.shape[2], a.key.shape[2])[-mask.dim() :]
    return all(m in (w, 1) for m, w in zip(mask.shape, wanted, strict=True))


def _cudnn(a: Attention) -> bool:
    """``can_use_cudnn_attention`` with cuDNN 9.24 and the frontend that torch 2.14 ships."""
    if not torch._C._get_cudnn_sdp_enabled() or not _four_dimensional(a) or not _low_precision(a):
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if a.release >= _CUDNN_SIXTEENTHS and a.dropout * 16 != math.floor(a.dropout * 16):
        return False
    if not _mask_fits(a) or not 80 <= a.sm <= 121:
        return False
    if not _not_empty(a) or not _last_strides_fit(a, ignore_single=True) or not _heads_fit(a, same_heads=False):
        return False
    return _cudnn_shapes(a)


def _cudnn_shapes(a: Attention) -> bool:
    """``check_cudnn_tensor_shapes`` and ``check_cudnn_d256_bprop_head_dim``."""
    batch, heads, sq, dqk = a.query.shape
    sk, dv = a.key.shape[2], a.value.shape[3]
    wide = a.sm == 90 or a.sm // 10 == 10
    limit = 256 if wide else 128
    if batch > _LARGEST_CUDNN_DIM or heads > _LARGEST_CUDNN_DIM or max(dqk, dv) > limit or dqk % 8 or dv % 8:
        return False
    if sk == 1 or (sq == 1 and (a.dropout != 0 or a.sm // 10 == 10)):
        return False  # of cuDNN 9.19 to 9.25.0, sm_10x serves one query in 9.24.1 alone
    return not (a.trains and wide) or (max(dqk, dv) <= 128 or (dqk, dv) in ((192, 128), (256, 256)))


def _flash(a: Attention) -> bool:
    """``can_use_flash_attention``."""
    if not torch._C._get_flash_sdp_enabled() or not _four_dimensional(a) or a.mask is not None:
        return False
    dim = a.query.shape[-1]
    if not (dim == a.key.shape[-1] == a.value.shape[-1] and dim <= 256) or not 80 <= a.sm <= _newest(a):
        return False
    if a.trains and (86 <= a.sm <= 89 or a.sm in (120, 121)) and not (dim <= 192 or (a.dropout == 0 and dim > 224)):
        return False
    if a.causal and a.query.shape[-2] != a.key.shape[-2]:
        return False
    return (
        _low_precision(a) and _heads_fit(a, same_heads=True) and _not_empty(a)
        and _last_strides_fit(a, ignore_single=True)
    )  # fmt: skip


def _alignment(a: Attention) -> int:
    """``minimum_gemm_alignment`` in elements."""
    half = a.query.dtype in _HALF
    alignment = 4 if a.sm >= 80 else 1
    if a.sm >= 80 or (a.sm >= 70 and half):
        alignment = max(alignment, 128 // (16 if half else 32))
    return alignment


def _efficient(a: Attention) -> bool:
    """``can_use_mem_efficient_attention``."""
    if not torch._C._get_mem_efficient_sdp_enabled() or not _four_dimensional(a) or not 50 <= a.sm <= _newest(a):
        return False
    if a.gqa and a.release < _SHARED_HEADS:
        a = replace(a, gqa=False)  # heads of keys must be as many as of queries
    dqk, dv, alignment = a.query.shape[-1], a.value.shape[-1], _alignment(a)
    if dqk != a.key.shape[-1] or dqk % alignment or dv % alignment or not dqk or not dv:
        return False
    if a.sm >= 80 and a.release >= _EFFICIENT_OFFSETS:
        step = alignment * a.query.element_size()
        if any(t.storage_offset() * t.element_size() % step for t in (a.query, a.key, a.value) if t.numel()):
            return False
    allowed = (*_HALF, torch.float32) if a.sm >= 80 else (torch.float16, torch.float32)
    return (
        _not_empty(a) and _last_strides_fit(a, ignore_single=False) and _heads_fit(a, same_heads=True)
        and _same_dtype(a, allowed)
    )  # fmt: skip


def _math(_: Attention) -> bool:
    return bool(torch._C._get_math_sdp_enabled())


_ALLOWED: dict[Backend, Callable[[Attention], bool]] = {
    Backend.CUDNN: _cudnn, Backend.FLASH: _flash, Backend.EFFICIENT: _efficient, Backend.MATH: _math,
}  # fmt: skip


def choose(a: Attention) -> Backend:
    """The back end that ``select_sdp_backend`` takes.

    Raises:
        RuntimeError: As torch does, where user code switched off every one that could serve.
    """
    for backend in _order(a):
        if _ALLOWED[backend](a):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def attention(sm: int) -> Callable[..., torch.Tensor]:
    """``scaled_dot_product_attention`` as it runs on the architecture ``sm`` (90 for sm_90)."""

    def call(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        given = Attention(
            query=query, key=key, value=value, mask=attn_mask, dropout=dropout_p, causal=is_causal,
            gqa=enable_gqa, sm=sm,
        )  # fmt: skip
        a = batched(given)
        out = _RUN[choose(a)](a, scale)
        return out if a is given else out.squeeze(0)

    return call


def batched(a: Attention) -> Attention:
    """``normalize_unbatched_input``: inputs without a batch get one of size 1."""
    if not a.query.dim() == a.key.dim() == a.value.dim() == 3 or a.release < _SHARED_HEADS:
        return a
    mask = a.mask
    while mask is not None and mask.dim() < 4:
        mask = mask.unsqueeze(0)
    query, key, value = (t.unsqueeze(0) for t in (a.query, a.key, a.value))
    return replace(a, query=query, key=key, value=value, mask=mask)


def _run_cudnn(a: Attention, scale: float | None) -> torch.Tensor:
    mask = _converted(a.mask, a.query.dtype, _LEAST_CUDNN_BIAS)
    out: torch.Tensor = aten._scaled_dot_product_cudnn_attention(
        a.query, a.key, a.value, mask, a.trains, a.dropout, a.causal, False, scale=scale
    )[0]
    return out


def _run_efficient(a: Attention, scale: float | None) -> torch.Tensor:
    mask = _converted(a.mask, a.query.dtype, -math.inf)
    mask = None if mask is None else _aligned(mask, a)
    out: torch.Tensor = aten._scaled_dot_product_efficient_attention(
        a.query, a.key, a.value, mask, a.trains, a.dropout, a.causal, scale=scale
    )[0]
    return out


def _run_flash(a: Attention, scale: float | None) -> torch.Tensor:
    """The head is padded to a multiple of 8 and the result cut back (``pad_last_dim``)."""
    dim = a.query.shape[-1]
    q, k, v = (_padded(t, 8) for t in (a.query, a.key, a.value))
    scale = scale if scale is not None else 1 / math.sqrt(dim)
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(q, k, v, a.dropout, a.causal, False, scale=scale)[0]
    return out[..., :dim] if out.shape[-1] != dim else out


def _run_math(a: Attention, scale: float | None) -> torch.Tensor:
    mask = _converted(a.mask, a.query.dtype, -math.inf)
    out: torch.Tensor = aten._scaled_dot_product_attention_math(
        a.query, a.key, a.value, mask, a.dropout, a.causal, None, scale=scale, enable_gqa=a.gqa
    )[0]
    return out


_RUN: dict[Backend, Callable[[Attention, float | None], torch.Tensor]] = {
    Backend.CUDNN: _run_cudnn, Backend.FLASH: _run_flash, Backend.EFFICIENT: _run_efficient, Backend.MATH: _run_math,
}  # fmt: skip


def _padded(t: torch.Tensor, alignment: int) -> torch.Tensor:
    """``pad_last_dim`` and ``pad_bias``."""
    rest = t.shape[-1] % alignment
    return t if rest == 0 else torch.nn.functional.pad(t, (0, alignment - rest))


def _converted(mask: torch.Tensor | None, dtype: torch.dtype, least: float) -> torch.Tensor | None:
    """``convert_boolean_attn_mask_``: a mask of truth values becomes 0 and ``least``."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    converted: torch.Tensor = aten.where.ScalarSelf(mask, 0.0, aten.scalar_tensor.default(least, dtype=dtype))
    return converted


def _aligned(mask: torch.Tensor, a: Attention) -> torch.Tensor:
    """``preprocess_mask``: rows that do not start at multiples of 8 are padded, then all is expanded."""
    last = mask.shape[-1]
    if mask.stride(-1) != 1 or any(s % 8 for s in mask.stride()[:-1]):
        mask = torch.nn.functional.pad(mask, (0, 8 - last % 8))[..., :last]
    return mask.expand(a.query.shape[0], a.query.shape[1], a.query.shape[2], a.key.shape[2])
