"""Results of the CUDA operators behind recurrent layers, which no other device has: shapes, and who shares memory."""

# ruff: noqa: ARG001, PLR0913, PLR0917 - the signatures are the operators' own
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxmem.kernels.rnn import Rnn, extent

aten = torch.ops.aten


def _cudnn_rnn(
    x: Tensor, weight: Sequence[Tensor], weight_stride0: int, weight_buf: Tensor | None, hx: Tensor, cx: Tensor | None,
    mode: int, hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float, train: bool,
    bidirectional: bool, batch_sizes: Sequence[int], dropout_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``_cudnn_rnn`` in aten/src/ATen/native/cudnn/RNN.cpp: output, both states, reserve space, weights."""
    directions = 2 if bidirectional else 1
    rnn = Rnn(
        mode=mode, input_size=x.shape[-1], hidden_size=hidden_size, proj_size=proj_size, layers=num_layers,
        directions=directions,
    )  # fmt: skip
    steps, batch = extent(x.shape, batch_first, batch_sizes)
    width = rnn.output_size * directions
    if batch_sizes:
        output = torch.empty((x.shape[0], width), dtype=x.dtype)
    else:
        output = torch.empty((steps, batch, width), dtype=x.dtype)
    if batch_first and not batch_sizes:
        output = output.transpose(0, 1)
    hy = torch.empty((num_layers * directions, batch, rnn.output_size), dtype=hx.dtype)
    cy = torch.empty((num_layers * directions, batch, hidden_size) if cx is not None else (0,), dtype=hx.dtype)
    kept = rnn.reserve_bytes(steps, batch, _name(x)) if train else 0
    reserve = torch.empty(kept, dtype=torch.uint8)
    if weight_buf is None:
        weight_buf = torch.empty(rnn.elements, dtype=x.dtype)
    return output, hy, cy, reserve, weight_buf


def _cudnn_rnn_backward(
    x: Tensor, weight: Sequence[Tensor], weight_stride0: int, weight_buf: Tensor, hx: Tensor, cx: Tensor | None,
    output: Tensor, grad_output: Tensor | None, grad_hy: Tensor | None, grad_cy: Tensor | None, mode: int,
    hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float, train: bool,
    bidirectional: bool, batch_sizes: Sequence[int], dropout_state: Tensor | None, reserve: Tensor,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor]]:  # fmt: skip
    """``_cudnn_rnn_backward``: the weights' gradients are views of one buffer where biases are parameters."""
    if not train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    rnn = Rnn(
        mode=mode, input_size=x.shape[-1], hidden_size=hidden_size, proj_size=proj_size, layers=num_layers,
        directions=2 if bidirectional else 1,
    )  # fmt: skip
    swapped = batch_first and not batch_sizes
    dx = torch.empty((x.shape[1], x.shape[0], *x.shape[2:]) if swapped else x.shape, dtype=x.dtype)
    dx = dx.transpose(0, 1) if swapped else dx
    dhx = torch.empty(hx.shape, dtype=hx.dtype)
    dcx = torch.empty(cx.shape, dtype=cx.dtype) if cx is not None else None
    return dx, dhx, dcx, _weight_gradients(weight, weight_stride0, rnn, x) if output_mask[3] else []


def _weight_gradients(weight: Sequence[Tensor], weight_stride0: int, rnn: Rnn, x: Tensor) -> list[Tensor]:
    """``_cudnn_rnn_backward_weight``."""
    if weight_stride0 != (5 if rnn.proj_size else 4):
        return [torch.empty(w.shape, dtype=w.dtype) for w in weight]
    buffer = torch.zeros(rnn.elements, dtype=x.dtype)
    places = rnn.places(biases=True)
    return [buffer.as_strided(shape, (shape[1], 1) if len(shape) == 2 else (1,), at) for at, shape in places]


def _name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``_thnn_fused_lstm_cell_cuda`` in aten/src/ATen/native/cuda/RNN.cu."""
    return _like(cx), _like(cx), _like(input_gates)


def _lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``_thnn_fused_lstm_cell_backward_impl_cuda``."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    bias = torch.empty(workspace.shape[1], dtype=workspace.dtype) if has_bias else None
    return _like(workspace), _like(cx), bias


def _gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``_thnn_fused_gru_cell_cuda``: five values per unit are kept."""
    return _like(hx), torch.empty((hx.shape[0], 5 * hx.shape[1]), dtype=hx.dtype)


def _gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """``_thnn_fused_gru_cell_backward_cuda``."""
    rows, gates = workspace.shape[0], 3 * (workspace.shape[1] // 5)

    def made(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=workspace.dtype)

    biases = (made(gates), made(gates)) if has_bias else (None, None)
    return made(rows, gates), made(rows, gates), _like(grad_hy), *biases


def _like(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype)


CPU_KERNELS: dict[str, Callable[..., Any]] = {
    "_cudnn_rnn": _cudnn_rnn,
    "_cudnn_rnn_backward": _cudnn_rnn_backward,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
    "_thnn_fused_gru_cell_backward": _gru_cell_backward,
}
"""By name, for small real tensors: values do not matter, memory does."""

RNN_SHAPES: dict[Any, Callable[..., Any]] = {getattr(aten, name).default: f for name, f in CPU_KERNELS.items()}
"""The same for fake tensors."""
