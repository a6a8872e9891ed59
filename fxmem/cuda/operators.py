"""Composite operators that take another way on CUDA than on the CPU, put right.

Each override is a Python kernel registered for the CPU's autograd or autocast key in a
scoped ``torch.library.Library``; leaving the scope removes it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

import torch

from fxmem.cuda.attention import attention
from fxmem.cuda.autocast import cuda_autocast
from fxmem.device import Device


def _dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """``dropout`` in aten/src/ATen/native/Dropout.cpp: fused on CUDA, with a 1-byte mask."""
    if p == 0 or not train or x.numel() == 0:
        return x
    if p == 1:
        return x.mul(torch.zeros((), dtype=x.dtype))
    return torch.native_dropout(x, p, train)[0]


@contextlib.contextmanager
def cuda_operators(device: Device, on_device: Callable[[torch.Tensor], bool]) -> Iterator[None]:
    """Install the overrides for ``device`` while inside."""
    sm = int(device.arch.removeprefix("sm_").rstrip("af"))
    library = torch.library.Library("aten", "IMPL")
    with contextlib.ExitStack() as stack:
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "overriding a previously registered kernel": meant
            library.impl("dropout", _dropout, "AutogradCPU")
            library.impl("scaled_dot_product_attention", attention(sm), "AutogradCPU")
            stack.enter_context(cuda_autocast(on_device, library))
        yield
