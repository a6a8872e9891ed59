"""Small programs run on the phantom device and under the recorder: do the allocations agree?

    calibration/phantom/phantom_run calibration/kernel_probe.py --measure > measured.json   (CUDA build of torch)
    python calibration/kernel_probe.py --compare measured.json

Each program is a function ``f(t)`` that takes a maker of tensors; it runs forward and, where
its result requires grad, backward. Library workspaces that are kept are left out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))


class Maker:
    """Makes tensors on the device; sizes differ between programs so that events can be told apart."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __call__(self, *shape, grad=False, dtype=None):
        x = torch.empty(*shape, dtype=dtype or self.dtype, device="cuda")
        return x.requires_grad_() if grad else x

    def ids(self, high, *shape):
        return torch.zeros(*shape, dtype=torch.long, device="cuda")


PROGRAMS = {}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def program(dtypes=FLOATS, amp=()):
    def register(f):
        for d in dtypes:
            PROGRAMS[f"{f.__name__}-{str(d)[6:]}"] = (f, d, None)
        for d in amp:
            PROGRAMS[f"{f.__name__}-amp-{str(d)[6:]}"] = (f, torch.float32, d)
        return f

    return register


def unary(name, g):
    f = lambda t: g(t(37, 1024, 17, grad=True))  # noqa: E731
    f.__name__ = name
    program()(f)


for _name in (
    "gelu",
    "silu",
    "relu",
    "softplus",
    "hardswish",
    "hardsigmoid",
    "mish",
    "elu",
    "selu",
    "celu",
    "logsigmoid",
    "tanhshrink",
    "softsign",
    "leaky_relu",
    "relu6",
    "hardtanh",
    "softshrink",
    "glu_",
):
    if _name == "glu_":
        continue
    unary(_name, getattr(F, _name))
for _name in (
    "exp",
    "log",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "sqrt",
    "rsqrt",
    "abs",
    "square",
    "reciprocal",
    "erf",
    "log1p",
    "expm1",
    "neg",
    "floor",
    "sign",
    "cumsum_",
    "std_",
    "logsumexp_",
):
    if not _name.endswith("_"):
        unary(_name, getattr(torch, _name))
unary("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))
unary("pow3", lambda x: x.pow(3))
unary("pow_half", lambda x: x**0.5)
unary("clamp", lambda x: x.clamp(-1, 1))
unary("softmax", lambda x: F.softmax(x, -1))
unary("softmax_mid", lambda x: F.softmax(x, 1))
unary("softmax_f32", lambda x: F.softmax(x, -1, dtype=torch.float32))
unary("log_softmax", lambda x: F.log_softmax(x, -1))
unary("mean_all", lambda x: x.mean())
unary("mean_last", lambda x: x.mean(-1, keepdim=True))
unary("mean_first", lambda x: x.mean(0))
unary("sum_all", lambda x: x.sum())
unary("sum_first", lambda x: x.sum((0, 1)))
unary("var", lambda x: x.var(-1, keepdim=True))
unary("var_mean", lambda x: torch.var_mean(x, -1, keepdim=True)[0])
unary("std", lambda x: x.std(-1))
unary("logsumexp", lambda x: x.logsumexp(-1))
unary("cumsum", lambda x: x.cumsum(1))
unary("cumprod", lambda x: x.cumprod(1))
unary("norm", lambda x: x.norm())
unary("norm_last", lambda x: x.norm(dim=-1))
unary("normalize", lambda x: F.normalize(x, dim=-1))
unary("max_all", lambda x: x.max())
unary("max_dim", lambda x: x.max(-1)[0])
unary("amax", lambda x: x.amax(-1))
unary("topk", lambda x: x.topk(5, -1)[0])
unary("sort", lambda x: x.sort(-1)[0])
unary("argmax", lambda x: x.argmax(-1))
unary("dropout", lambda x: F.dropout(x, 0.1))
unary("dropout2d", lambda x: F.dropout2d(x, 0.1))
unary("dropout_inplace", lambda x: F.dropout(x * 1, 0.1, inplace=True))
unary("alpha_dropout", lambda x: F.alpha_dropout(x, 0.1, training=True))
unary("glu", lambda x: F.glu(x, 1))
unary("transpose_contiguous", lambda x: x.transpose(1, 2).contiguous())
unary("reshape_copy", lambda x: x.transpose(1, 2).reshape(37, -1))
unary("chunk_cat", lambda x: torch.cat(x.chunk(2, 1)[::-1], 1))
unary("stack", lambda x: torch.stack([x, x], 1))
unary("split_mul", lambda x: (lambda a, b: a * b)(*x.split(512, 1)))
unary("roll", lambda x: x.roll(3, 1))
unary("flip", lambda x: x.flip(1))
unary("repeat", lambda x: x.repeat(1, 1, 2))
unary("repeat_interleave", lambda x: x.repeat_interleave(2, 0))
unary("expand_mul", lambda x: x[:, :1] * x)
unary("pad", lambda x: F.pad(x, (1, 2)))
unary("pad_reflect", lambda x: F.pad(x, (1, 2), mode="reflect"))
unary("index_slice", lambda x: x[:, 3:900:2])
unary("masked_fill", lambda x: x.masked_fill(x > 0, 0.0))
unary("where", lambda x: torch.where(x > 0, x, torch.zeros_like(x)))
unary("tril", lambda x: x.tril())
unary("to_float", lambda x: x.float() * 2)
unary("to_half_and_back", lambda x: x.half().float())
unary("mul_scalar_tensor", lambda x: x * torch.tensor(2.0))
unary("add_", lambda x: (x * 1).add_(1).mul_(2))
unary("addcmul", lambda x: torch.addcmul(x, x, x))
unary("lerp", lambda x: torch.lerp(x, x * 2, 0.3))
unary("sub_mean_sq", lambda x: (x - x.mean(-1, keepdim=True)).pow(2).mean(-1))
unary("einsum", lambda x: torch.einsum("abc,abd->acd", x, x))
unary("matmul_self", lambda x: x @ x.transpose(1, 2))
unary("prod", lambda x: x.prod(-1))
unary("residual", lambda x: (lambda h: h + h.sin() + h.cos())(x * 2))
unary("atan2", lambda x: torch.atan2(x, x * 2))
unary("maximum", lambda x: torch.maximum(x, x * 2))
unary("div", lambda x: x / (x + 1))
unary("view_inplace", lambda x: (x * 1).view(37, -1).mul_(2).sin())
unary("slice_inplace", lambda x: (lambda y: (y[:, :100].mul_(2), y.sin())[1])(x * 1))
unary("setitem", lambda x: (lambda y: (y.__setitem__((slice(None), slice(0, 10)), 0.0), y.sin())[1])(x * 1))
unary("unfold", lambda x: x.unfold(1, 16, 8))
unary("gather", lambda x: x.gather(1, torch.zeros(37, 20, 17, dtype=torch.long, device="cuda")))
unary(
    "scatter_add",
    lambda x: torch.zeros(37, 30, 17, dtype=x.dtype, device="cuda").scatter_add(
        1, torch.zeros(37, 1024, 17, dtype=torch.long, device="cuda"), x
    ),
)
unary("index_select", lambda x: x.index_select(1, torch.zeros(33, dtype=torch.long, device="cuda")))
unary("advanced_index", lambda x: x[:, torch.zeros(33, dtype=torch.long, device="cuda")])
unary(
    "advanced_index2",
    lambda x: x[torch.zeros(5, dtype=torch.long, device="cuda"), torch.zeros(5, dtype=torch.long, device="cuda")],
)
unary(
    "index_add",
    lambda x: torch.zeros(37, 30, 17, dtype=x.dtype, device="cuda").index_add(
        1, torch.zeros(1024, dtype=torch.long, device="cuda"), x
    ),
)
unary("checkpoint", lambda x: torch.utils.checkpoint.checkpoint(lambda y: (y * 2).sin().cos(), x, use_reentrant=False))
unary(
    "checkpoint_reentrant",
    lambda x: torch.utils.checkpoint.checkpoint(lambda y: (y * 2).sin().cos(), x, use_reentrant=True),
)
unary("rms_norm", lambda x: F.rms_norm(x, (17,)))
unary("softmax_big", lambda x: F.softmax(x.view(37, -1), -1))
unary("nan_to_num", lambda x: x.nan_to_num())
unary("bernoulli", lambda x: x * torch.empty_like(x).bernoulli_(0.5))
unary("rand_like", lambda x: x * torch.rand_like(x))
unary("sum_to", lambda x: x * torch.ones(17, dtype=x.dtype, device="cuda", requires_grad=True))
unary("broadcast_bias", lambda x: x + torch.ones(1, 1024, 1, dtype=x.dtype, device="cuda", requires_grad=True))


@program(amp=(torch.float16, torch.bfloat16))
def linear(t):
    return F.linear(t(64, 333, grad=True), t(257, 333, grad=True), t(257, grad=True))


@program(amp=(torch.float16, torch.bfloat16))
def linear3(t):
    return F.linear(t(7, 64, 333, grad=True), t(257, 333, grad=True), t(257, grad=True))


@program(amp=(torch.float16,))
def linear3_nobias(t):
    return F.linear(t(7, 64, 333, grad=True), t(257, 333, grad=True))


@program(amp=(torch.float16,))
def linear3_transposed(t):
    return F.linear(t(64, 7, 333, grad=True).transpose(0, 1), t(257, 333, grad=True), t(257, grad=True))


@program(amp=(torch.float16,))
def linear4(t):
    return F.linear(t(7, 3, 64, 333, grad=True), t(257, 333, grad=True), t(257, grad=True))


@program(amp=(torch.float16,))
def linear_nograd(t):
    w, b = t(257, 333, grad=True), t(257, grad=True)
    with torch.no_grad():
        F.linear(t(64, 7, 333).transpose(0, 1), w, b)
        return F.linear(t(7, 64, 333), w, b)


@program()
def embedding(t):
    return F.embedding(t.ids(9, 13, 77), t(1031, 129, grad=True))


@program()
def embedding_padding(t):
    return F.embedding(t.ids(9, 13, 777), t(1031, 129, grad=True), padding_idx=0)


@program()
def embedding_small(t):
    return F.embedding(t.ids(9, 13, 77), t(31, 129, grad=True))


@program(dtypes=FLOATS)
def embedding_bag(t):
    return F.embedding_bag(t.ids(9, 13, 77), t(1031, 129, grad=True))


@program(amp=(torch.float16, torch.bfloat16))
def cross_entropy(t):
    return F.cross_entropy(t(129, 1031, grad=True), t.ids(5, 129))


@program()
def cross_entropy_smooth(t):
    return F.cross_entropy(t(129, 1031, grad=True), t.ids(5, 129), label_smoothing=0.1)


@program()
def cross_entropy_2d(t):
    return F.cross_entropy(t(3, 21, 65, 67, grad=True), t.ids(5, 3, 65, 67))


@program(dtypes=(torch.float32,))
def mse(t):
    return F.mse_loss(t(129, 1031, grad=True), t(129, 1031))


@program()
def bce_logits(t):
    return F.binary_cross_entropy_with_logits(t(129, 1031, grad=True), t(129, 1031))


@program()
def smooth_l1(t):
    return F.smooth_l1_loss(t(129, 1031, grad=True), t(129, 1031))


@program()
def l1(t):
    return F.l1_loss(t(129, 1031, grad=True), t(129, 1031))


@program()
def kl_div(t):
    return F.kl_div(t(129, 1031, grad=True), t(129, 1031), reduction="batchmean")


def conv(name, *args, shape=(5, 24, 37, 41), weight=(48, 24, 3, 3), bias=True, cl=False, grad=True, **kw):
    def f(t):
        x, w = t(*shape, grad=grad), t(*weight, grad=grad)
        b = t(kw.get("_bias", weight[0]), grad=grad) if bias else None
        if cl:
            fmt = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
            with torch.no_grad():
                x, w = (p.to(memory_format=fmt).requires_grad_(grad) for p in (x, w))
        op = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[len(shape)]
        if kw.get("transposed"):
            op = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}[len(shape)]
        rest = {k: v for k, v in kw.items() if k in ("stride", "padding", "dilation", "groups", "output_padding")}
        return op(x, w, b, **rest)

    f.__name__ = name
    program(amp=(torch.float16,))(f)


conv("conv")
conv("conv_nobias", bias=False)
conv("conv_stride", stride=2, padding=1)
conv("conv_dilated", dilation=2)
conv("conv_group", weight=(48, 6, 3, 3), groups=4)
conv("conv_depthwise", weight=(24, 1, 3, 3), groups=24, padding=1)
conv("conv_depthwise5s2", weight=(24, 1, 5, 5), groups=24, padding=2, stride=2)
conv("conv_depthwise32", shape=(5, 32, 37, 41), weight=(32, 1, 3, 3), groups=32, padding=1)
conv("conv_depthwise64", shape=(8, 64, 32, 32), weight=(64, 1, 3, 3), groups=64, padding=1, bias=False)
conv("conv_depthwise64s2", shape=(8, 64, 32, 32), weight=(64, 1, 3, 3), groups=64, padding=1, bias=False, stride=2)
conv("conv_depthwise_mult", weight=(48, 1, 3, 3), groups=24, padding=1)
conv("conv_depthwise_cl", weight=(24, 1, 3, 3), groups=24, padding=1, cl=True)
conv("conv_cl", cl=True)
conv("conv_1x1", weight=(48, 24, 1, 1))
conv("conv_1d", shape=(5, 24, 370), weight=(48, 24, 3))
conv("conv_1d_dw", shape=(5, 24, 370), weight=(24, 1, 3), groups=24)
conv("conv_3d", shape=(2, 8, 9, 17, 19), weight=(16, 8, 3, 3, 3))
conv("conv_3d_dw", shape=(2, 8, 9, 17, 19), weight=(8, 1, 3, 3, 3), groups=8)
conv("conv_t", weight=(24, 48, 2, 2), stride=2, transposed=True, _bias=48)
conv("conv_t_out", weight=(24, 48, 3, 3), stride=2, padding=1, output_padding=1, transposed=True, _bias=48)
conv("conv_infer", grad=False)


@program()
def conv_slice_input(t):
    x = t(5, 48, 37, 41, grad=True)
    return F.conv2d(x[:, 8:32], t(48, 24, 3, 3, grad=True))


@program()
def conv_expand_grad(t):
    return F.conv2d(t(5, 24, 37, 41, grad=True), t(48, 24, 3, 3, grad=True)).mean((2, 3))


@program()
def conv_permuted(t):
    return F.conv2d(t(5, 37, 41, 24, grad=True).permute(0, 3, 1, 2), t(48, 24, 3, 3, grad=True), t(48, grad=True))


def norm(name, g, shape=(5, 24, 37, 41)):
    def f(t):
        return g(t, t(*shape, grad=True))

    f.__name__ = name
    program(amp=(torch.float16, torch.bfloat16))(f)


norm("batch_norm_train", lambda t, x: F.batch_norm(x, t(24), t(24), t(24, grad=True), t(24, grad=True), True))
norm("batch_norm_eval", lambda t, x: F.batch_norm(x, t(24), t(24), t(24, grad=True), t(24, grad=True), False))
norm(
    "batch_norm_f32",
    lambda t, x: F.batch_norm(
        x,
        *(t(24, dtype=torch.float32) for _ in range(2)),
        *(t(24, dtype=torch.float32, grad=True) for _ in range(2)),
        True,
    ),
)
norm("batch_norm_f32_eval", lambda t, x: F.batch_norm(x, *(t(24, dtype=torch.float32) for _ in range(4)), False))
norm(
    "batch_norm_cl",
    lambda t, x: F.batch_norm(
        x.contiguous(memory_format=torch.channels_last), t(24), t(24), t(24, grad=True), t(24, grad=True), True
    ),
)
norm("batch_norm_plain", lambda t, x: F.batch_norm(x, None, None, None, None, True))
norm("batch_norm_1d", lambda t, x: F.batch_norm(x, t(24), t(24), t(24, grad=True), t(24, grad=True), True), (333, 24))
norm("group_norm", lambda t, x: F.group_norm(x, 8, t(24, grad=True), t(24, grad=True)))
norm(
    "group_norm_cl",
    lambda t, x: F.group_norm(x.contiguous(memory_format=torch.channels_last), 8, t(24, grad=True), t(24, grad=True)),
)
norm("instance_norm", lambda t, x: F.instance_norm(x, None, None, t(24, grad=True), t(24, grad=True)))
norm("layer_norm", lambda t, x: F.layer_norm(x, (41,), t(41, grad=True), t(41, grad=True)))
norm("layer_norm_big", lambda t, x: F.layer_norm(x, (1024,), t(1024, grad=True), t(1024, grad=True)), (500, 1024))
norm("layer_norm_rows", lambda t, x: F.layer_norm(x, (96,), t(96, grad=True), t(96, grad=True)), (50000, 96))
norm("layer_norm_cl", lambda t, x: F.layer_norm(x.permute(0, 2, 3, 1), (24,), t(24, grad=True), t(24, grad=True)))
norm("layer_norm_plain", lambda t, x: F.layer_norm(x, (41,)))
norm("rms_norm_w", lambda t, x: F.rms_norm(x, (41,), t(41, grad=True)))
norm("max_pool", lambda t, x: F.max_pool2d(x, 3, 2, 1))
norm("avg_pool", lambda t, x: F.avg_pool2d(x, 3, 2, 1))
norm("adaptive_avg", lambda t, x: F.adaptive_avg_pool2d(x, 7))
norm("adaptive_avg1", lambda t, x: F.adaptive_avg_pool2d(x, 1))
norm("adaptive_max", lambda t, x: F.adaptive_max_pool2d(x, 7))
norm("interp_nearest", lambda t, x: F.interpolate(x, scale_factor=2))
norm("interp_bilinear", lambda t, x: F.interpolate(x, scale_factor=2, mode="bilinear"))
norm("interp_bicubic", lambda t, x: F.interpolate(x, scale_factor=2, mode="bicubic"))
norm("interp_aa", lambda t, x: F.interpolate(x, size=(20, 20), mode="bilinear", antialias=True))
norm("pixel_shuffle", lambda t, x: F.pixel_shuffle(x, 2))
norm("unfold2d", lambda t, x: F.unfold(x, 3))
norm("grid_sample", lambda t, x: F.grid_sample(x, t(5, 20, 20, 2)))
norm("cat_mixed", lambda t, x: torch.cat([x.half(), x.float()], 1))
norm("stack_mixed", lambda t, x: torch.stack([x.half(), x.float()], 1))
norm("prelu", lambda t, x: F.prelu(x, t(24, grad=True)))
norm("matmul4", lambda t, x: x @ x.transpose(-1, -2))
norm("matmul_vec", lambda t, x: x @ t(41, grad=True))
norm("bmm", lambda t, x: torch.bmm(x, x.transpose(1, 2)), (6, 65, 33))
norm("baddbmm", lambda t, x: torch.baddbmm(t(6, 65, 65, grad=True), x, x.transpose(1, 2)), (6, 65, 33))
norm(
    "mm_expanded",
    lambda t, x: t(1, 33, 17, grad=True).expand(6, -1, -1).transpose(1, 2) @ x.transpose(1, 2),
    (6, 65, 33),
)
norm("cdist", lambda t, x: torch.cdist(x, x), (6, 65, 33))


def sdpa(name, shape=(3, 8, 129, 64), kv=None, train=True, mask=None, packed=False, **kw):
    def f(t):
        if packed:
            b, h, s, d = shape
            qkv = t(b, s, 3 * h * d, grad=train)
            q, k, v = (x.view(b, s, h, d).transpose(1, 2) for x in qkv.chunk(3, -1))
        else:
            q, k, v = t(*shape, grad=train), t(*(kv or shape), grad=train), t(*(kv or shape), grad=train)
        m = None
        if mask == "bool":
            m = torch.ones(shape[0], 1, shape[2], (kv or shape)[2], dtype=torch.bool, device="cuda")
        elif mask == "float":
            m = torch.zeros(shape[0], 1, shape[2], (kv or shape)[2], dtype=q.dtype, device="cuda")
        elif mask == "bias":
            m = torch.zeros(1, shape[1], shape[2], (kv or shape)[2], dtype=q.dtype, device="cuda", requires_grad=True)
        return F.scaled_dot_product_attention(q, k, v, m, **kw)

    f.__name__ = name
    program(amp=(torch.float16, torch.bfloat16))(f)


sdpa("sdpa")
sdpa("sdpa_infer", train=False)
sdpa("sdpa_causal", is_causal=True)
sdpa("sdpa_dropout", dropout_p=0.1)
sdpa("sdpa_dropout_eighth", dropout_p=0.125)
sdpa("sdpa_bool", mask="bool")
sdpa("sdpa_float", mask="float")
sdpa("sdpa_bias", mask="bias")
sdpa("sdpa_bool_infer", mask="bool", train=False)
sdpa("sdpa_packed", packed=True)
sdpa("sdpa_packed_infer", packed=True, train=False)
sdpa("sdpa_gqa", kv=(3, 2, 129, 64), enable_gqa=True)
sdpa("sdpa_gqa_infer", kv=(3, 2, 129, 64), enable_gqa=True, train=False)
sdpa("sdpa_cross", kv=(3, 8, 77, 64))
sdpa("sdpa_head80", shape=(3, 8, 129, 80))
sdpa("sdpa_head36", shape=(3, 8, 129, 36))
sdpa("sdpa_head36_infer", shape=(3, 8, 129, 36), train=False)
sdpa("sdpa_head30", shape=(3, 8, 129, 30))
sdpa("sdpa_head256", shape=(2, 4, 129, 256))
sdpa("sdpa_head512", shape=(2, 4, 129, 512))
sdpa("sdpa_one", shape=(3, 8, 1, 64), kv=(3, 8, 129, 64), train=False)
sdpa("sdpa_single", shape=(3, 8, 1, 64), train=False)
sdpa("sdpa_3d", shape=(8, 129, 64))
sdpa("sdpa_even", shape=(3, 8, 128, 64))
sdpa("sdpa_bool_even", shape=(3, 8, 128, 64), mask="bool")


def layer(name, make, shape, train=True, **kw):
    def f(t):
        m = make().to(device="cuda", dtype=t.dtype).train(train)
        x = t(*shape, grad=train)
        if train:
            y = m(x, **kw) if "attn" not in name else m(x, x, x, **kw)
        else:
            with torch.no_grad():
                y = m(x, **kw) if "attn" not in name else m(x, x, x, **kw)
        return y[0] if isinstance(y, tuple) else y

    f.__name__ = name
    program(amp=(torch.float16,))(f)


layer("mha_attn", lambda: nn.MultiheadAttention(96, 4), (65, 3, 96))
layer("mha_attn_bf", lambda: nn.MultiheadAttention(96, 4, batch_first=True), (3, 65, 96), need_weights=False)
layer("mha_attn_eval", lambda: nn.MultiheadAttention(96, 4, batch_first=True), (3, 65, 96), train=False)
layer(
    "mha_attn_eval_nw",
    lambda: nn.MultiheadAttention(96, 4, batch_first=True),
    (3, 65, 96),
    train=False,
    need_weights=False,
)
layer("encoder_layer", lambda: nn.TransformerEncoderLayer(96, 4, 256, batch_first=True), (3, 65, 96))
layer("encoder_layer_eval", lambda: nn.TransformerEncoderLayer(96, 4, 256, batch_first=True), (3, 65, 96), train=False)
layer("encoder_layer_sf", lambda: nn.TransformerEncoderLayer(96, 4, 256), (65, 3, 96))
layer(
    "encoder", lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(96, 4, 256, batch_first=True), 2), (3, 65, 96)
)
layer(
    "encoder_eval",
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(96, 4, 256, batch_first=True), 2),
    (3, 65, 96),
    train=False,
)
for _rnn in ("LSTM", "GRU", "RNN"):
    layer(_rnn.lower(), lambda r=_rnn: getattr(nn, r)(96, 128, 2), (33, 5, 96))
    layer(
        _rnn.lower() + "_bf_bi",
        lambda r=_rnn: getattr(nn, r)(96, 128, 1, batch_first=True, bidirectional=True),
        (5, 33, 96),
    )
    layer(_rnn.lower() + "_eval", lambda r=_rnn: getattr(nn, r)(96, 128, 2, dropout=0.1), (33, 5, 96), train=False)
layer("lstm_dropout", lambda: nn.LSTM(96, 128, 2, dropout=0.1), (33, 5, 96))
layer("lstm_cell", lambda: nn.LSTMCell(96, 128), (5, 96))
layer("gru_cell", lambda: nn.GRUCell(96, 128), (5, 96))


def optim(name, make, dtypes=(torch.float32, torch.bfloat16)):
    def f(t):
        params = [nn.Parameter(t(n, 13)) for n in (1000, 37, 2049)]
        o = make(params)
        for _ in range(2):
            for p in params:
                p.grad = torch.empty_like(p)
            o.step()
            o.zero_grad()

    f.__name__ = "opt_" + name
    program(dtypes=dtypes)(f)


O = torch.optim
for _n in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop"):
    optim(_n.lower(), lambda p, n=_n: getattr(O, n)(p, lr=0.01))
    optim(_n.lower() + "_single", lambda p, n=_n: getattr(O, n)(p, lr=0.01, foreach=False))
optim("sgd_momentum", lambda p: O.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4))
optim("sgd_nesterov", lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True))
optim("adamw_fused", lambda p: O.AdamW(p, fused=True))
optim("adam_fused", lambda p: O.Adam(p, fused=True))
optim("sgd_fused", lambda p: O.SGD(p, lr=0.1, momentum=0.9, fused=True))
optim("adagrad_fused", lambda p: O.Adagrad(p, fused=True))
optim("adamw_capturable", lambda p: O.AdamW(p, capturable=True))
optim("adam_amsgrad", lambda p: O.Adam(p, amsgrad=True))
optim("rmsprop_full", lambda p: O.RMSprop(p, momentum=0.9, centered=True))
if hasattr(O, "Adafactor"):
    optim("adafactor", lambda p: O.Adafactor(p, foreach=True))
    optim("adafactor_single", lambda p: O.Adafactor(p, foreach=False))
if hasattr(O, "Muon"):
    optim("muon", lambda p: O.Muon(p))


@program(dtypes=(torch.float32, torch.bfloat16))
def clip_grad(t):
    params = [nn.Parameter(t(n, 13)) for n in (1000, 37, 2049)]
    for p in params:
        p.grad = torch.empty_like(p)
    nn.utils.clip_grad_norm_(params, 1.0)


sys.modules.setdefault("kernel_probe", sys.modules[__name__])
for _path in sorted(Path(__file__).parent.glob("probe_*.py")):  # more programs: `from kernel_probe import program`
    importlib.import_module(_path.stem)


def run(name):
    f, dtype, amp = PROGRAMS[name]
    t = Maker(dtype)
    with torch.autocast("cuda", dtype=amp or torch.float16, enabled=amp is not None):
        y = f(t)
    if isinstance(y, torch.Tensor) and y.requires_grad:
        grad = torch.empty_like(y)
        y.backward(grad)
        del grad
    del y


def measure(names):
    x = torch.zeros(4, 4, device="cuda", requires_grad=True)
    (x @ x).sum().backward()  # both threads' cuBLAS workspaces exist from here on
    F.linear(x, x, x[0]).sum().backward()
    del x
    torch.autocast("cuda", dtype=torch.bfloat16)  # below sm_80 it tries a bfloat16 tensor, once
    out = {}
    for name in names:
        torch.cuda.manual_seed(0)  # the dropout state of recurrent layers is made anew
        torch.cuda.memory._record_memory_history(
            max_entries=100000, stacks="all" if os.environ.get("PROBE_STACKS") else "python"
        )
        try:
            run(name)
            error = ""
        except Exception as e:
            error = f"{type(e).__name__}: {e}"[:300]
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        ids, events = {}, []
        for e in trace:
            if e["action"] == "alloc":
                ids[e["addr"]] = len(events)
                where = [f["name"][:90] for f in e["frames"]]
                where = [w for w in where if not w.startswith(SKIP)][:4] if os.environ.get("PROBE_STACKS") else []
                events.append([e["size"], where])
            elif e["action"] == "free_completed" and e["addr"] in ids:
                events.append([-events[ids.pop(e["addr"])][0], []])
        out[name] = {"events": events, "error": error}
    return out


SKIP = (
    "torch::unwind",
    "torch::CapturedTraceback",
    "torch::cuda",
    "c10::",
    "at::detail::empty",
    "at::native::empty",
    "at::_ops",
    "std::",
    "at::empty",
    "Py",
    "_Py",
    "torch::autograd::THP",
    "torch::autograd::VariableType",
    "cfunction",
    "method_",
    "THP",
)


def ours(name, device="h200"):
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fxmem.api import _target
    from fxmem.cuda import personality
    from fxmem.device import find_device
    from fxmem.kernels import expand
    from fxmem.recording.notes import to_tape
    from fxmem.recording.recorder import Recorder
    from fxmem.tape import Phase

    gpu = find_device(device)
    recorder = Recorder(FakeTensorMode(allow_non_fake_inputs=True))
    recorder.phase = Phase.FORWARD
    backward = torch.Tensor.backward

    def phased(self, *args, **kwargs):
        recorder.phase = Phase.BACKWARD
        try:
            return backward(self, *args, **kwargs)
        finally:
            recorder.phase = Phase.FORWARD

    torch.Tensor.backward = phased
    try:
        with personality(recorder, gpu), recorder:
            recorder.begin_step(1)
            run(name)
            recorder.end_steps()
    finally:
        torch.Tensor.backward = backward
    tape = expand(to_tape(recorder, batch=1, training=True, modules=()), _target(gpu))
    events = []
    place = {}
    for i, op in enumerate(tape.ops):
        for e in range(op.start, op.stop):
            place[e] = op.name
    for i, e in enumerate(tape.events):
        s = tape.storages[e if e >= 0 else ~e]
        if s.nbytes and s.name not in KEPT:
            events.append([s.nbytes if e >= 0 else -s.nbytes, [place.get(i, "-"), str(s.shape), s.dtype]])
    return events


KEPT = ("cublas",)
"""Workspaces that stay from one program to the next."""


def settled(events):
    """Frees in a row commute: sort each run of them."""
    out, run = [], []
    for e in events:
        if e[0] < 0:
            run.append(e)
        else:
            out += sorted(run, key=lambda x: x[0]) + [e]
            run = []
    return out + sorted(run, key=lambda x: x[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--show", type=int, default=14)
    o = parser.parse_args()
    names = [n for n in PROGRAMS if any(n.startswith(k) for k in o.only.split(","))]
    if o.measure:
        print(json.dumps(measure(names)))
        return
    measured = json.loads(o.compare.read_text())
    good, bad = [], []
    for name in names:
        if name not in measured:
            continue
        real = measured[name]
        try:
            mine, error = ours(name, o.device), ""
        except Exception as e:
            mine, error = [], f"{type(e).__name__}: {e}"[:200]
        if real["error"]:
            good.append(name)
            print(f"{name}: real fails ({real['error'][:80]}); ours {error[:60] or 'runs'}")
            continue
        mine, real["events"] = settled(mine), settled(real["events"])
        a, b = [e[0] for e in mine], [e[0] for e in real["events"]]
        if a == b and not error:
            good.append(name)
            continue
        bad.append(name)
        print(f"=== {name} {error}")
        i = 0
        while i < min(len(a), len(b)) and a[i] == b[i]:
            i += 1
        for j in range(max(0, i - 1), i + o.show):
            left = f"{mine[j][0]:>11} {' '.join(mine[j][1])[:60]}" if j < len(mine) else ""
            right = (
                f"{real['events'][j][0]:>11} {' < '.join(w.split('(')[0][-38:] for w in real['events'][j][1][:3])}"
                if j < len(b)
                else ""
            )
            if left or right:
                print(f"  {left:75}| {right}")
    print(f"{len(good)} agree, {len(bad)} do not:", " ".join(bad))


if __name__ == "__main__":
    main()
