"""Fused attention: what the flash, memory-efficient and cuDNN kernels take, forward and backward.

Shapes are those of the operators' arguments: batch, heads, length, head size.
"""

from __future__ import annotations

import math
import struct

from fxmem.kernels.steps import (
    Drop,
    Out,
    Rule,
    Step,
    Take,
    Target,
    argument,
    contiguous,
    itemsize,
    launch_scratch,
    nbytes,
    numel,
    tensor,
)
from fxmem.tape import Op, Role, TensorMeta

_HALF = ("float16", "bfloat16")
_FLOAT = 4


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _given(op: Op, position: int) -> TensorMeta:
    meta = tensor(op, position)
    assert meta is not None
    return meta


def _transposed(meta: TensorMeta) -> TensorMeta:
    """``transpose(1, 2)``: the kernels see batch, length, heads, head size."""
    (b, h, s, d), (sb, sh, ss, sd) = meta.shape, meta.stride
    return meta._replace(shape=(b, s, h, d), stride=(sb, ss, sh, sd))


def _contiguous_copy(key: str, meta: TensorMeta) -> list[Step]:
    """``contiguous()``: a copy only where the layout is another."""
    return [] if contiguous(meta) else [Take(key, nbytes(meta))]


# --------------------------------------------------------------------- flash
def _flash(op: Op, target: Target) -> list[Step]:
    """``mha_fwd`` in aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.

    The state of the random numbers lies on the device, from torch 2.7 on, and is taken twice where there is dropout.
    """
    dropout = bool(argument(op, 3, "dropout_p", 0.0))
    steps: list[Step] = [Out(0), Out(1)]
    if dropout:
        return steps if target.torch_version < (2, 7) else [*steps, Take("rng", 16), Out(3), Out(2)]
    return [*steps, *_split_keys(_given(op, 0), _given(op, 1), target), Out(2), Out(3)]


def _split_keys(q: TensorMeta, k: TensorMeta, target: Target) -> list[Step]:
    """``set_params_splitkv``: partial results where few blocks would leave the GPU idle."""
    (batch, heads, sq, dim), (heads_k, sk) = q.shape, k.shape[1:3]
    if sq == 1 and heads > heads_k:  # the groups of one query become a sequence
        heads, sq = heads_k, heads // heads_k
    blocks = -(-sk // (256 if dim <= 64 else 128 if dim <= 128 else 64))
    splits = _splits(batch * heads * -(-sq // 64), 2 * target.sm_count, blocks)
    if splits <= 1:
        return []
    rows = splits * batch * heads * sq * _FLOAT
    return [launch_scratch("lse_accum", rows), launch_scratch("out_accum", rows * _rounded_head(dim))]


def _rounded_head(dim: int) -> int:
    """``head_size_rounded``."""
    return _round_up(dim, 32 if dim <= 128 else 64)


def _splits(blocks: int, processors: int, key_blocks: int) -> int:
    """``num_splits_heuristic``: the fewest splits that reach 85 % of the best occupancy."""
    if blocks >= _single(_single(0.8) * processors):
        return 1
    most = min(128, processors, key_blocks)
    efficiency = {}
    for n in range(1, most + 1):
        if n == 1 or -(-key_blocks // n) != -(-key_blocks // (n - 1)):
            waves = _single(blocks * n / processors)
            efficiency[n] = _single(waves / math.ceil(waves))
    best = max(efficiency.values(), default=0.0)
    return next((n for n, e in efficiency.items() if e >= 0.85 * best), 1)


def _single(value: float) -> float:
    """Rounded to single precision."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def _flash_backward(op: Op, target: Target) -> list[Step]:
    """``_flash_attention_backward`` in .../cuda/attention_backward.cu, ``mha_bwd`` in flash_api.cpp."""
    grad, q, k, out = (_given(op, i) for i in (0, 1, 2, 4))
    (batch, heads, sq, dim), (heads_k, sk) = q.shape, k.shape[1:3]
    rows = batch * heads * _round_up(sq, 128) * _FLOAT
    steps = _contiguous_copy("grad_out", _transposed(grad)) + _contiguous_copy("out", _transposed(out))
    steps += [Out(0), Out(1), Out(2), Take("softmax_d", rows), Take("dq_accum", rows * _rounded_head(dim))]
    if heads_k != heads:
        expanded = batch * sk * heads * dim * itemsize(q.dtype)
        steps += [Take("dk_expanded", expanded), Take("dv_expanded", expanded)]
    return steps


# --------------------------------------------------------------------- memory-efficient
def _efficient(op: Op, target: Target) -> list[Step]:
    """``_efficient_attention_forward`` in .../transformers/cuda/attention.cu.

    Heads larger than a block of keys accumulate in single precision
    (``kNeedsOutputAccumulatorBuffer`` in mem_eff_attention/kernel_forward.h; blocks: kernels/cutlassF.h).
    """
    q, v = _given(op, 0), _given(op, 2)
    steps: list[Step] = [Out(2), Out(3), Out(0), Out(1)]
    if q.dtype in _HALF and max(q.shape[3], v.shape[3]) > 128:
        steps.append(Take("output_accum", math.prod(q.shape[:3]) * v.shape[3] * _FLOAT))
    return steps


def _efficient_backward(op: Op, target: Target) -> list[Step]:
    """``_efficient_attention_backward`` in .../transformers/cuda/attention_backward.cu."""
    grad, q, k, v, out = (_given(op, i) for i in (0, 1, 2, 3, 5))
    steps = [*_contiguous_copy("grad_out", _transposed(grad)), Out(0), Out(1), Out(2), Out(3)]
    batch, heads = q.shape[:2]
    if k.shape[1] != heads:
        each = batch * heads * k.shape[2] * itemsize(k.dtype)
        steps += [Take("grad_k_expanded", each * k.shape[3]), Take("grad_v_expanded", each * v.shape[3])]
    rows = math.prod(q.shape[:3]) * _FLOAT
    if q.dtype in _HALF:
        steps.append(Take("delta", rows))
    else:
        steps += [Take("product", numel(out) * _FLOAT), Take("sum", rows)]
        if 1 not in q.shape[1:3]:
            steps += [Take("delta", rows), Drop("sum")]
        steps.append(Drop("product"))
    return [
        *steps,
        launch_scratch("workspace", _efficient_workspace(q, k, v, bool(argument(op, 9, "dropout_p", 0.0)), target)),
    ]


def _efficient_workspace(q: TensorMeta, k: TensorMeta, v: TensorMeta, dropout: bool, target: Target) -> int:
    """``Params::workspace_size`` in mem_eff_attention/kernel_backward.h with the split of the keys before it."""
    (batch, heads, sq, dim), sk, dim_v = q.shape, k.shape[2], v.shape[3]
    largest = max(dim, dim_v)
    half = q.dtype in _HALF
    rows, columns = _backward_block(half, largest, dropout, target.sm)
    in_registers = half and largest <= rows and largest <= 128
    splits = -(-sk // columns)
    if splits * heads * batch >= 256 and sk <= 2 * columns:
        splits = 1
    accumulates = half and not in_registers
    if accumulates:
        splits = min(splits, 200 // (batch * heads))
    splits = max(splits, 1)
    words = -(-sq // rows) * -(-dim // columns) * (4 + rows * columns)
    if accumulates:
        words += splits * columns * (_round_up(dim, rows) + _round_up(dim_v, rows))
    return batch * heads * _round_up(words, 4) * _FLOAT


def _backward_block(half: bool, largest: int, dropout: bool, sm: int) -> tuple[int, int]:
    """Queries and keys of the first kernel in ``dispatch_cutlassB`` (kernels/cutlassB.h) that fits.

    Which ones need too much shared memory was seen on the phantom device: sm_75 has 64 KiB,
    sm_86, sm_89 and sm_120 have 99 KiB, the others have room for all.
    """
    roomy = sm >= 80 and sm not in (86, 89) and sm < 120
    if largest <= 64:
        return 64, 64
    if not half:
        return (128, 64) if roomy else (64, 64)
    if largest > 128 or sm < 80:
        return 128, 64
    if roomy:
        return 128, 128
    return (128, 64) if largest <= 96 and not dropout and sm in (86, 89) else (64, 64)


# --------------------------------------------------------------------- cuDNN
def _cudnn(op: Op, target: Target) -> list[Step]:
    """``_cudnn_attention_forward`` in .../cuda/attention.cu: seed and offset first, on the device."""
    return [Out(2), Out(3), Out(0), Out(1)]


def _cudnn_backward(op: Op, target: Target) -> list[Step]:
    """``run_cudnn_SDP_bprop`` in aten/src/ATen/native/cudnn/MHA.cpp.

    The workspace is that of cudnn-frontend's own nodes, the sums of the queries' gradients and of
    the softmax in single precision (``get_fe_workspace_size_node`` of the backward node in
    include/cudnn_frontend/node/scaled_dot_product_flash_attention.h); on sm_10x heads of 256 need
    no sums of gradients. The workspace of cuDNN's plan comes on top: seen on sm_90, 256 bytes and
    with grouped heads ``batch * heads * keys * (dim + value dim) * 2`` more.
    """
    grad, q, v = _given(op, 0), _given(op, 1), _given(op, 3)
    steps: list[Step] = [Out(0), Out(1), Out(2)]
    if grad.stride[3] != 1:
        steps += _contiguous_copy("grad_out", grad)
    rows = math.prod(q.shape[:3]) * _FLOAT
    wide = target.sm // 10 == 10 and q.shape[3] == v.shape[3] == 256
    return [*steps, Take("cudnn_attention", rows if wide else rows * (q.shape[3] + 1), Role.WORKSPACE)]


# --------------------------------------------------------------------- math
def _safe_softmax(op: Op, target: Target) -> list[Step]:
    """``_safe_softmax`` in aten/src/ATen/native/transformers/attention.cpp: rows of minus infinity become 0."""
    x, out = _given(op, 0), op.outputs[0]
    dim = argument(op, 1, "dim")
    assert isinstance(dim, int)
    rows = numel(x) // max(x.shape[dim], 1)
    return [Out(0), Take("masked", numel(x)), Take("masked_rows", rows), Take("zero", itemsize(out.dtype))]


ATTENTION: dict[str, Rule] = {
    "_safe_softmax.default": _safe_softmax,
    "_scaled_dot_product_flash_attention.default": _flash,
    "_scaled_dot_product_flash_attention_backward.default": _flash_backward,
    "_scaled_dot_product_efficient_attention.default": _efficient,
    "_scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
    "_scaled_dot_product_cudnn_attention.default": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward.default": _cudnn_backward,
}
