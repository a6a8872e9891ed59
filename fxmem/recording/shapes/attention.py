"""Shape functions of fused attention where torch's fake result takes other memory than CUDA's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten


def _efficient_backward(*args: Any, **_: Any) -> tuple[torch.Tensor | None, ...]:
    """``_efficient_attention_backward`` in aten/src/ATen/native/transformers/cuda/attention_backward.cu.

    The bias's gradient is a view of rows that begin at multiples of 16 elements. torch's cache of
    fake results makes its storage end with the view from the second call on.
    """
    inputs: Sequence[torch.Tensor] = args[1:4]
    bias, wanted = args[4], args[10]
    grads: list[torch.Tensor | None] = [torch.empty_permuted(t.shape, (0, 2, 1, 3), dtype=t.dtype) for t in inputs]
    grad_bias = None
    if bias is not None and wanted[3]:
        last = bias.shape[-1]
        grad_bias = torch.empty((*bias.shape[:-1], -(-last // 16) * 16), dtype=bias.dtype)[..., :last]
    return (*grads, grad_bias)


ATTENTION_SHAPES: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward
}
