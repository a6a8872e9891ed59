"""Inference of ``nn.MultiheadAttention`` and ``nn.TransformerEncoderLayer`` as CUDA runs it.

Without gradients both modules call one operator that CUDA and CPU implement in C++. Here these
operators are taken apart into the calls that CUDA makes, in its order:
``native_multi_head_attention_cuda`` in aten/src/ATen/native/transformers/cuda/attention.cu,
``transformer_encoder_layer_forward`` in aten/src/ATen/native/transformers/transformer.cpp,
their helpers in aten/src/ATen/native/transformers/attention.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fxmem.cuda.attention import Attention, Backend, choose

aten = torch.ops.aten

Tensor = torch.Tensor


def native_attention(sm: int) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """``_native_multi_head_attention`` on the architecture ``sm``."""

    def call(
        query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_head: int, *rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        weights = rest[:4]
        mask, need_weights, average, kind = _filled(rest[4:], (None, True, True, None))
        same = query is key is value
        if same and not need_weights and mask is None and _fused(query, num_head, sm):
            return _projected_attention(query, num_head, weights), None
        return _attention(query, key, value, num_head, weights, (mask, kind, need_weights, average))

    return call


def _filled(given: Sequence[Any], defaults: Sequence[Any]) -> list[Any]:
    """Arguments with the defaults of those that the dispatcher left out."""
    return [*given, *defaults[len(given) :]]


def _fused(x: Tensor, heads: int, sm: int) -> bool:
    """Whether a fused back end would serve: asked on views of the input, before it is projected."""
    q = x.view(x.shape[0], -1, heads, x.shape[2] // heads).transpose(1, 2)
    asked = Attention(query=q, key=q, value=q, mask=None, dropout=0.0, causal=False, gqa=False, sm=sm)
    return choose(asked) is not Backend.MATH


def _projected_attention(x: Tensor, heads: int, weights: Sequence[Tensor]) -> Tensor:
    batch, _, width = x.shape
    projected = aten.linear(x, weights[0], weights[1])
    q, k, v = (c.view(batch, -1, heads, width // heads).transpose(1, 2) for c in aten.chunk.default(projected, 3, -1))
    attended = aten.scaled_dot_product_attention(q, k, v, None, 0.0, False)
    past: Tensor = attended.transpose(1, 2).reshape(batch, -1, width)
    out: Tensor = aten.linear(past, weights[2], weights[3])
    return out


def _attention(
    query: Tensor, key: Tensor, value: Tensor, heads: int, weights: Sequence[Tensor],
    options: tuple[Tensor | None, int | None, bool, bool],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The way without fused attention: scores in a tensor of their own, softmax and context in place."""
    mask, kind, need_weights, average = options
    batch, length, width = query.shape
    packed = _rescaled(_projection(query, key, value, weights[0]), weights[1], heads)
    q, k, v = aten.split.Tensor(packed.view(3 * batch, heads, length, width // heads), batch, 0)
    del packed
    flat = (batch * heads, length, width // heads)
    scores: Tensor | None = aten.bmm(q.view(flat), k.view(flat).transpose(2, 1)).view(batch, heads, length, length)
    assert scores is not None
    scores = _softmax(scores, mask, kind)
    context = aten.bmm.out(scores.view(batch * heads, length, length), v.view(flat), out=q.view(flat))
    if not need_weights:
        scores = None
    proj = _output(context.view(batch, heads, length, width // heads), weights)
    if scores is not None and average:
        scores = aten.sum.dim_IntList(scores, [1])
        aten.div_.Scalar(scores, heads)
    return proj, scores


def _projection(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    """``qkv_projection``: one product where the inputs are the same tensor, else their products side by side."""
    if query is key is value:
        return _product(query, weight)
    width = query.shape[2]
    if key is value:
        first, second = aten.split_with_sizes(weight, [width, 2 * width], 0)
        return _joined([_product(query, first), _product(key, second)])
    parts = aten.chunk.default(weight, 3, 0)
    return _joined([_product(x, w) for x, w in zip((query, key, value), parts, strict=True)])


def _product(x: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = aten.matmul(x, weight.t())
    return product


def _joined(parts: Iterable[Tensor]) -> Tensor:
    joined: Tensor = aten.cat(list(parts), 2)
    return joined


def _rescaled(projected: Tensor, bias: Tensor, heads: int) -> Tensor:
    """``transform_bias_rescale_qkv_cuda``: queries, keys and values in one new tensor."""
    batch, length, width = projected.shape
    packed: Tensor = aten.new_empty(projected, [3, batch, heads, length, width // 3 // heads], dtype=bias.dtype)
    return packed


def _softmax(scores: Tensor, mask: Tensor | None, kind: int | None) -> Tensor:
    """``masked_softmax``: in place where there is no mask."""
    if mask is None:
        out: Tensor = aten._softmax.out(scores, scores.dim() - 1, False, out=scores)
        return out
    if mask.dtype is not torch.bool:
        mask = aten._to_copy(mask, dtype=torch.bool)
    masked: Tensor = aten._masked_softmax(scores, mask, scores.dim() - 1, kind)
    return masked


def _output(context: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """``transform0213_gemm_nt_bias``."""
    batch, heads, length, size = context.shape
    rows = context.permute(0, 2, 1, 3).contiguous().view(batch * length, heads * size)
    out: Tensor = aten.linear(rows, weights[2], weights[3])
    return out.view(batch, length, out.shape[1])


def encoder_layer(src: Tensor, embed_dim: int, num_heads: int, *rest: Any) -> Tensor:
    """``_transformer_encoder_layer_fwd``."""
    weights, (gelu, norm_first, eps), norms, forward = rest[:4], rest[4:7], rest[7:11], rest[11:15]
    mask, kind = _filled(rest[15:], (None, None))

    def norm(x: Tensor, number: int) -> Tensor:
        weight, bias = norms[2 * number : 2 * number + 2]
        out: Tensor = aten.layer_norm(x, [embed_dim], weight, bias, eps)
        return out

    x = norm(src, 0) if norm_first else src
    x = aten._native_multi_head_attention(x, x, x, embed_dim, num_heads, *weights, mask, False, True, kind)[0]
    aten.add_.Tensor(x, src)
    if not norm_first:
        x = norm(x, 0)
    before = x
    if norm_first:
        x = norm(x, 1)
    x = _feed_forward(x, forward, gelu)
    aten.add_.Tensor(x, before)
    return x if norm_first else norm(x, 1)


def _feed_forward(x: Tensor, weights: Sequence[Tensor], gelu: bool) -> Tensor:
    """``ffn``: the activation is part of the first product."""
    w1, b1, w2, b2 = weights
    hidden = aten._addmm_activation(b1, x.view(-1, x.shape[2]), w1.t(), use_gelu=gelu)
    hidden = aten.addmm(b2, hidden, w2.t())
    out: Tensor = hidden.view(x.shape[0], x.shape[1], -1)
    return out


def left_aligned(notes: dict[str, None]) -> Callable[[Tensor, Tensor], bool]:
    """``_nested_tensor_from_mask_left_aligned``: answered with no, so that the padding stays and is counted.

    Args:
        notes: Where the assumption is noted, as a key.
    """

    def call(_src: Tensor, _mask: Tensor) -> bool:
        notes["nn.TransformerEncoder: CUDA drops padding at the end of rows (nested tensors); it is counted"] = None
        return False

    return call


def has_torch_function(arguments: Iterable[Any]) -> bool:
    """``torch.overrides.has_torch_function`` without the function mode that stands for the device."""
    disabled = torch._C._disabled_torch_function_impl
    return any(
        isinstance(a, torch.Tensor) and type(a) is not torch.Tensor and type(a).__torch_function__ is not disabled
        for a in arguments
    )
