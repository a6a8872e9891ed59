"""Products: their gradients take the short way of tensors without zeros, which fake tensors are denied.

Mirrors ``prod_backward`` and ``cumprod_backward`` of torch/csrc/autograd/FunctionsManual.cpp. There a CUDA tensor is
asked whether it holds a zero; a tensor subclass gets the long way that is right for both. Values are not known
here: that there is no zero is what nearly all programs see.
"""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def _below(op: Any, *args: Any) -> torch.Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        out: torch.Tensor = op(*args)
    return out


class _Prod(torch.autograd.Function):
    """Of all elements."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        out = _below(aten.prod.default, x) if dtype is None else _below(lambda t: aten.prod.default(t, dtype=dtype), x)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, out = ctx.saved_tensors
        x = x.to(grads[0].dtype)
        if not x.dim():
            return grads[0].clone(), None
        _ = x == 0  # and its ``nonzero()``, of which only a little scratch memory is not known here
        return grads[0] * (out / x), None


class _ProdDim(torch.autograd.Function):
    """Along one dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, keepdim: bool, dtype: torch.dtype | None) -> torch.Tensor:
        out = _below(lambda t: aten.prod.dim_int(t, dim, keepdim, dtype=dtype), x)
        ctx.save_for_backward(x, out)
        ctx.place = None if keepdim or not x.dim() else dim
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        x, out = ctx.saved_tensors
        if not x.dim():
            return grad, None, None, None
        if ctx.place is not None:
            grad, out = grad.unsqueeze(ctx.place), out.unsqueeze(ctx.place)
        x = x.to(grad.dtype)
        mask = x == 0
        count = mask.sum(ctx.dim, True)
        count.sum()
        return grad * (out / x), None, None, None


class _CumProd(torch.autograd.Function):
    """Running products along one dimension."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, dtype: torch.dtype | None) -> torch.Tensor:
        out = _below(lambda t: aten.cumprod.default(t, dim, dtype=dtype), x)
        ctx.save_for_backward(x, out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, out = ctx.saved_tensors
        if x.numel() <= 1 or x.shape[ctx.dim] == 1:
            return grads[0], None, None
        grad = grads[0].to(x.dtype)
        weighted = out * grad
        zero = x == 0
        zero.any()
        return _reversed_cumsum(weighted, ctx.dim).div(x), None, None


def _reversed_cumsum(x: torch.Tensor, dim: int) -> torch.Tensor:
    flipped = x.flip(dim)
    sums = flipped.cumsum(dim)  # in C++ both live until the expression's end
    return sums.flip(dim)


def _prod(x: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    out: torch.Tensor = _Prod.apply(x, dtype)
    return out


def _prod_dim(x: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    out: torch.Tensor = _ProdDim.apply(x, dim, keepdim, dtype)
    return out


def _cumprod(x: torch.Tensor, dim: int, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    out: torch.Tensor = _CumProd.apply(x, dim, dtype)
    return out


def register_products(library: Any) -> None:
    """Install the overrides in ``library``."""
    library.impl("prod", _prod, "AutogradCPU")
    library.impl("prod.dim_int", _prod_dim, "AutogradCPU")
    library.impl("cumprod", _cumprod, "AutogradCPU")
