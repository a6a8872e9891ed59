"""Composite operators that take another way on CUDA than on the CPU, put right.

Each override is a Python kernel registered for the CPU's autograd or autocast key in a
scoped ``torch.library.Library``; leaving the scope removes it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fxmem.cuda.attention import attention
from fxmem.cuda.autocast import Autocast, cuda_autocast
from fxmem.cuda.fourier import register_fourier
from fxmem.cuda.multihead import encoder_layer, has_torch_function, left_aligned, native_attention
from fxmem.cuda.normalization import register_normalization
from fxmem.cuda.places import replaced
from fxmem.cuda.products import register_products
from fxmem.device import Device


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """``dropout`` in aten/src/ATen/native/Dropout.cpp: fused on CUDA, with a 1-byte mask."""
    if p == 0 or not train or x.numel() == 0:
        return x
    if p == 1:
        return x.mul(torch.zeros((), dtype=x.dtype))
    return torch.native_dropout(x, p, train)[0]


def _softmax(kernel: Any) -> Callable[..., torch.Tensor]:
    """``softmax`` in aten/src/ATen/native/SoftMax.cpp: CUDA reads float16 and writes float32 in one pass."""

    def call(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if x.dtype is torch.float16 and dtype is torch.float32:
            fused: torch.Tensor = kernel(x, dim, True)
            return fused
        result: torch.Tensor = kernel(x if dtype is None else x.to(dtype), dim, False)
        return result

    return call


def _ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor,
    blank: int = 0, reduction: int = 1, zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    """``ctc_loss`` in aten/src/ATen/native/LossCTC.cpp reads the lengths of plain tensors on the host."""
    lengths = input_lengths.tolist(), target_lengths.tolist()
    loss: torch.Tensor = torch.ops.aten.ctc_loss.IntList(log_probs, targets, *lengths, blank, reduction, zero_infinity)
    return loss


class _Overrides:
    """Registers kernels under ``AutogradCPU`` and keeps them, for autocast to know."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library = library
        self.kernels: dict[str, Callable[..., Any]] = {}

    def impl(self, name: str, kernel: Callable[..., Any], key: str) -> None:
        """``torch.library.Library.impl``."""
        self.kernels[name] = kernel
        self.library.impl(name, kernel, key)


@contextlib.contextmanager
def cuda_operators(
    device: Device, on_device: Callable[[torch.Tensor], bool], notes: dict[str, None]
) -> Iterator[Autocast]:
    """Install the overrides for ``device`` while inside; what they have to assume becomes a key of ``notes``."""
    sm = int(device.arch.removeprefix("sm_").rstrip("af"))
    library = torch.library.Library("aten", "IMPL")
    with contextlib.ExitStack() as stack:
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "overriding a previously registered kernel": meant
            overrides = _Overrides(library)
            overrides.impl("dropout", _dropout, "AutogradCPU")
            overrides.impl("softmax.int", _softmax(torch.ops.aten._softmax), "AutogradCPU")
            overrides.impl("log_softmax.int", _softmax(torch.ops.aten._log_softmax), "AutogradCPU")
            overrides.impl("ctc_loss.Tensor", _ctc_loss, "AutogradCPU")
            overrides.impl("scaled_dot_product_attention", attention(sm), "AutogradCPU")
            overrides.impl("_native_multi_head_attention", native_attention(sm), "AutogradCPU")
            overrides.impl("_transformer_encoder_layer_fwd", encoder_layer, "AutogradCPU")
            overrides.impl("_nested_tensor_from_mask_left_aligned", left_aligned(notes), "AutogradCPU")
            register_normalization(overrides)
            register_fourier(overrides)
            register_products(overrides)
            stack.enter_context(replaced([(torch.overrides, "has_torch_function", has_torch_function)]))
            autocast = stack.enter_context(cuda_autocast(on_device, library, overrides.kernels))
        yield autocast
