"""Fourier transforms of half precision: CUDA has them, the CPU refuses them.

Mirrors ``promote_type_fft``, ``fft_r2c`` and ``fftn_r2c`` of aten/src/ATen/native/SpectralOps.cpp. All other
dtypes go the composite way that is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

_COMPLEX = {torch.float16: torch.complex32, torch.bfloat16: torch.complex64}
_MODES = {"forward": 2, "backward": 0, "ortho": 1}
"""``fft_norm_mode`` of a forward transform; a backward one has ``forward`` and ``backward`` exchanged."""


def _wide(op: Any) -> Callable[..., torch.Tensor]:
    """A transform that first makes its input complex."""

    def call(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = op.decompose(x.to(_COMPLEX[x.dtype]) if x.dtype in _COMPLEX else x, *args, **kwargs)
        return result

    return call


def _real(op: Any, *, forward: bool, onesided: bool) -> Callable[..., torch.Tensor]:
    """A transform along one dimension of what may be real."""

    def call(
        x: torch.Tensor, n: int | None = None, dim: int = -1, norm: str | None = None
    ) -> torch.Tensor:  # fmt: skip
        if x.dtype not in _COMPLEX:
            result: torch.Tensor = op.decompose(x, n, dim, norm)
            return result
        out: torch.Tensor = aten._fft_r2c.default(
            _resized(x, [dim], [n]), [dim % x.dim()], _mode(norm, forward), onesided
        )
        return out if forward else torch.conj(out)

    return call


def _real_n(op: Any, dims: Sequence[int] | None) -> Callable[..., torch.Tensor]:
    """A real transform along several dimensions, ``dims`` where none are given."""

    def call(
        x: torch.Tensor, s: Sequence[int] | None = None, dim: Sequence[int] | None = dims, norm: str | None = None
    ) -> torch.Tensor:
        if x.dtype not in _COMPLEX:
            result: torch.Tensor = op.decompose(x, s, *([] if dim is None and dims else [dim]), norm)
            return result
        along = list(dim) if dim is not None else list(range(x.dim() - len(s), x.dim()) if s else range(x.dim()))
        x = _resized(x, along, s or [None] * len(along))
        out: torch.Tensor = aten._fft_r2c.default(x, [d % x.dim() for d in along], _mode(norm, True), True)
        return out

    return call


def _resized(x: torch.Tensor, dims: Sequence[int], sizes: Sequence[int | None]) -> torch.Tensor:
    """``resize_fft_input``: slices, or fills with zeros."""
    pad = [0] * (2 * x.dim())
    for d, size in zip(dims, sizes, strict=True):
        if size is None or size == -1:
            continue
        if size < x.shape[d]:
            x = x.narrow(d, 0, size)
        pad[2 * (x.dim() - 1 - d % x.dim()) + 1] = size - x.shape[d]
    return aten.constant_pad_nd(x, pad) if any(pad) else x


def _mode(norm: str | None, forward: bool) -> int:
    norm = norm or "backward"
    exchanged = {"forward": "backward", "backward": "forward"}
    return _MODES[norm if forward else exchanged.get(norm, norm)]


def register_fourier(library: Any) -> None:
    """Install the overrides in ``library``."""
    for name, forward, onesided in (
        ("fft_fft", True, False), ("fft_ifft", False, False), ("fft_rfft", True, True), ("fft_ihfft", False, True),
    ):  # fmt: skip
        library.impl(name, _real(getattr(aten, name).default, forward=forward, onesided=onesided), "AutogradCPU")
    library.impl("fft_rfft2", _real_n(aten.fft_rfft2.default, (-2, -1)), "AutogradCPU")
    library.impl("fft_rfftn", _real_n(aten.fft_rfftn.default, None), "AutogradCPU")
    for name in ("fft_fft2", "fft_ifft2", "fft_fftn", "fft_ifftn", "fft_irfft", "fft_irfft2", "fft_irfftn", "fft_hfft"):
        library.impl(name, _wide(getattr(aten, name).default), "AutogradCPU")
