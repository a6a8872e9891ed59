"""Fourier transforms as cuFFT leaves them: results lie with the transformed dimensions innermost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxmem.kernels.fft import complex_to_complex, complex_to_real, real_to_complex

aten = torch.ops.aten


def _c2c(x: torch.Tensor, dim: Sequence[int], *_: Any) -> torch.Tensor:
    walk = complex_to_complex(x.shape, x.stride(), dim)
    return torch.empty_strided(walk.shape, walk.strides, dtype=x.dtype)


def _r2c(x: torch.Tensor, dim: Sequence[int], _: int, onesided: bool) -> torch.Tensor:
    walk = real_to_complex(x.shape, x.stride(), dim, onesided=onesided)
    dtype = torch.complex64 if x.dtype is torch.bfloat16 else x.dtype.to_complex()  # cuFFT's half is widened
    return torch.empty_strided(walk.shape, walk.strides, dtype=dtype)


def _c2r(x: torch.Tensor, dim: Sequence[int], _: int, length: int) -> torch.Tensor:
    walk = complex_to_real(x.shape, x.stride(), dim, length)
    return torch.empty_strided(walk.shape, walk.strides, dtype=x.dtype.to_real())


FFT_SHAPES: dict[Any, Callable[..., Any]] = {
    aten._fft_c2c.default: _c2c, aten._fft_r2c.default: _r2c, aten._fft_c2r.default: _c2r,
}  # fmt: skip
