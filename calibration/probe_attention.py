"""Attention called in more ways: layouts, masks, grouped heads, decoding, chosen back ends, the transformer modules.

Imported by ``kernel_probe.py``; measure with ``PHANTOM_CUDNN=stub``.
"""

import torch
import torch.nn.functional as F
from kernel_probe import program
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

HALF = (torch.float16, torch.bfloat16)
ALL = (torch.float32, *HALF)


def heads(t, b, h, s, d, layout, grad):
    if layout == "bshd":
        return t(b, s, h * d, grad=grad).view(b, s, h, d).transpose(1, 2)
    if layout == "odd":
        return t(b, h, s + 1, d, grad=grad)[:, :, 1:]
    return t(b, h, s, d, grad=grad)


def attention(
    name,
    q=(3, 8, 129, 64),
    kv=None,
    v_dim=None,
    layout="bhsd",
    mask=None,
    train=True,
    backend=None,
    total=False,
    dtypes=ALL,
    **kw,
):
    def f(t):
        b, h, s, d = q
        hk, sk = kv or (h, s)
        x, y, z = (heads(t, b, *n, layout, train) for n in ((h, s, d), (hk, sk, d), (hk, sk, v_dim or d)))
        m = None
        if mask is not None:
            shape, kind, grad = mask
            m = torch.ones(shape, dtype=torch.bool if kind == "bool" else t.dtype, device="cuda", requires_grad=grad)
        with sdpa_kernel(backend if backend is not None else list(BACKENDS)):
            out = F.scaled_dot_product_attention(x, y, z, m, **kw)
        return out.sum() if total else out

    f.__name__ = "att_" + name
    program(dtypes=dtypes)(f)


BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION)
for _b, _n in zip(BACKENDS, ("flash", "efficient", "math", "cudnn"), strict=True):
    if _n == "flash":
        _types = HALF
    elif _n == "cudnn":
        _types = HALF
    else:
        _types = ALL
    for _l in ("bhsd", "bshd", "odd"):
        attention(f"{_n}_{_l}", layout=_l, backend=_b, dtypes=_types)
    attention(f"{_n}_total", backend=_b, dtypes=_types, total=True)
    attention(f"{_n}_infer", layout="bshd", backend=_b, dtypes=_types, train=False)
    attention(f"{_n}_gqa", kv=(2, 129), backend=_b, dtypes=_types, enable_gqa=True)
    attention(f"{_n}_mqa", kv=(1, 129), backend=_b, dtypes=_types, enable_gqa=_n == "math")
    attention(
        f"{_n}_gqa_decode", q=(3, 8, 1, 64), kv=(2, 2500), backend=_b, dtypes=_types, enable_gqa=True, train=False
    )
    attention(f"{_n}_decode", q=(1, 4, 1, 128), kv=(4, 5000), backend=_b, dtypes=_types, train=False)
    attention(f"{_n}_long", q=(1, 2, 70, 64), kv=(2, 3000), backend=_b, dtypes=_types, train=False)
    attention(f"{_n}_causal", q=(2, 4, 200, 96), backend=_b, dtypes=_types, is_causal=True)
    attention(f"{_n}_dropout", q=(2, 4, 200, 96), backend=_b, dtypes=_types, dropout_p=0.25)
    attention(f"{_n}_head128", q=(2, 4, 200, 128), backend=_b, dtypes=_types)
    attention(f"{_n}_head160", q=(2, 4, 200, 160), backend=_b, dtypes=_types)
    attention(f"{_n}_one_head", q=(2, 1, 200, 64), backend=_b, dtypes=_types)
for _k in ("bool", "float"):
    attention(f"mask2_{_k}", mask=((129, 129), _k, False))
    attention(f"mask2_even_{_k}", q=(3, 8, 128, 64), mask=((128, 128), _k, False))
    attention(f"mask4_{_k}", mask=((3, 8, 129, 129), _k, False))
    attention(f"row_{_k}", mask=((3, 1, 1, 129), _k, False))
    attention(f"math_mask_{_k}", mask=((3, 1, 1, 129), _k, False), backend=SDPBackend.MATH)
attention("bias_head", mask=((1, 8, 129, 129), "float", True))
attention("bias_even", q=(3, 8, 128, 64), mask=((3, 8, 128, 128), "float", True))
for _d in (136, 192, 200, 224, 232, 256):
    attention(f"flash_head{_d}", q=(2, 4, 200, _d), backend=SDPBackend.FLASH_ATTENTION, dtypes=HALF)
attention("value128", v_dim=128)
attention("value_efficient", v_dim=256, backend=SDPBackend.EFFICIENT_ATTENTION)


def module(
    name, make, shape, train, *, dtypes=(torch.float32, torch.float16), amp=(torch.float16,), call=None, weights=True
):
    def f(t):
        m = make().to(device="cuda", dtype=t.dtype).train(train)
        x = t(*shape, grad=train)
        with torch.set_grad_enabled(train):
            y = call(t, m, x) if call is not None else m(x)
        return y[0] if isinstance(y, tuple) else y

    f.__name__ = "att_" + name
    program(dtypes=dtypes, amp=amp)(f)


def padding(x):
    return torch.zeros(x.shape[:2], dtype=torch.bool, device="cuda")


def square(x, dtype=torch.bool):
    return torch.zeros(x.shape[1], x.shape[1], dtype=dtype, device="cuda")


def mha(**kw):
    return nn.MultiheadAttention(96, 4, **{"batch_first": True, **kw})


CALLS = {
    "plain": lambda t, m, x: m(x, x, x),
    "slim": lambda t, m, x: m(x, x, x, need_weights=False),
    "per_head": lambda t, m, x: m(x, x, x, average_attn_weights=False),
    "padding": lambda t, m, x: m(x, x, x, key_padding_mask=padding(x)),
    "slim_padding": lambda t, m, x: m(x, x, x, key_padding_mask=padding(x), need_weights=False),
    "mask": lambda t, m, x: m(x, x, x, attn_mask=square(x), need_weights=False),
    "both": lambda t, m, x: m(x, x, x, attn_mask=square(x), key_padding_mask=padding(x)),
    "float": lambda t, m, x: m(x, x, x, attn_mask=square(x, t.dtype), need_weights=False),
    "causal": lambda t, m, x: m(x, x, x, attn_mask=square(x), is_causal=True, need_weights=False),
    "cross": lambda t, m, x: m(x, *[t(x.shape[0], 33, 96)] * 2),
    "cross_slim": lambda t, m, x: m(x, *[t(x.shape[0], 33, 96)] * 2, need_weights=False),
    "other_value": lambda t, m, x: m(x, x, t(*x.shape), need_weights=False),
}
for _train in (True, False):
    _s = "train" if _train else "eval"
    for _name, _call in CALLS.items():
        module(f"mha_{_name}_{_s}", mha, (3, 65, 96), _train, call=_call)
    module(f"mha_seq_first_{_s}", lambda: mha(batch_first=False), (65, 3, 96), _train, call=CALLS["slim"])
    module(f"mha_dropout_{_s}", lambda: mha(dropout=0.1), (3, 65, 96), _train, call=CALLS["slim"])
    module(f"mha_no_bias_{_s}", lambda: mha(bias=False), (3, 65, 96), _train, call=CALLS["slim"])
    module(
        f"mha_odd_{_s}", lambda: nn.MultiheadAttention(96, 3, batch_first=True), (3, 65, 96), _train, call=CALLS["slim"]
    )
    module(
        f"mha_head20_{_s}",
        lambda: nn.MultiheadAttention(80, 4, batch_first=True),
        (3, 65, 80),
        _train,
        call=CALLS["slim"],
    )
    module(
        f"mha_head15_{_s}",
        lambda: nn.MultiheadAttention(60, 4, batch_first=True),
        (3, 65, 60),
        _train,
        call=CALLS["slim"],
    )
    module(f"mha_2d_{_s}", mha, (65, 96), _train, call=CALLS["slim"])


def layer(**kw):
    return nn.TransformerEncoderLayer(96, 4, 256, **{"batch_first": True, **kw})


LAYER_CALLS = {
    "plain": None,
    "padding": lambda t, m, x: m(x, src_key_padding_mask=padding(x)),
    "causal": lambda t, m, x: m(x, square(x), is_causal=True),
}
for _train in (True, False):
    _s = "train" if _train else "eval"
    for _name, _call in LAYER_CALLS.items():
        if _name == "causal":
            continue
        module(f"layer_{_name}_{_s}", layer, (3, 65, 96), _train, call=_call)
        module(f"stack_{_name}_{_s}", lambda: nn.TransformerEncoder(layer(), 2), (3, 65, 96), _train, call=_call)
    module(f"layer_gelu_{_s}", lambda: layer(activation="gelu"), (3, 65, 96), _train)
    module(f"layer_first_{_s}", lambda: layer(norm_first=True), (3, 65, 96), _train)
    module(f"layer_causal_{_s}", layer, (3, 65, 96), _train, call=lambda t, m, x: m(x, square(x), is_causal=True))
    module(
        f"stack_causal_{_s}",
        lambda: nn.TransformerEncoder(layer(), 2),
        (3, 65, 96),
        _train,
        call=lambda t, m, x: m(x, square(x), is_causal=True),
    )
    module(
        f"decoder_{_s}",
        lambda: nn.TransformerDecoderLayer(96, 4, 256, batch_first=True),
        (3, 65, 96),
        _train,
        call=lambda t, m, x: m(x, t(3, 33, 96), tgt_mask=square(x), tgt_is_causal=True),
    )
    module(
        f"transformer_{_s}",
        lambda: nn.Transformer(96, 4, 1, 1, 256, batch_first=True),
        (3, 65, 96),
        _train,
        call=lambda t, m, x: m(x, t(3, 33, 96)),
    )
