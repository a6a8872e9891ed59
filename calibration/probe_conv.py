"""Convolution operators called one by one, without autograd: kinds by layouts by types.

Imported by ``kernel_probe.py``; measure with ``PHANTOM_CUDNN=stub``.
"""

import torch
from kernel_probe import program

aten = torch.ops.aten
TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def layout(x, how):
    """A tensor of the same shape with other strides."""
    d = x.dim()
    match how:
        case "c":
            return x
        case "cl":  # channels innermost, also for 3-D
            return x.permute(0, *range(2, d), 1).contiguous().permute(0, d - 1, *range(1, d - 1))
        case "slice":  # every second channel block of a larger tensor
            return torch.empty(x.shape[0], 2 * x.shape[1], *x.shape[2:], dtype=x.dtype, device="cuda")[:, : x.shape[1]]
        case "clslice":
            big = torch.empty(x.shape[0], *x.shape[2:], 2 * x.shape[1], dtype=x.dtype, device="cuda")
            return big.permute(0, d - 1, *range(1, d - 1))[:, : x.shape[1]]
        case "expand":
            return torch.empty((), dtype=x.dtype, device="cuda").expand(x.shape)
        case "expand_sp":
            return torch.empty(*x.shape[:2], *(1,) * (d - 2), dtype=x.dtype, device="cuda").expand(x.shape)
        case "swap":
            return x.transpose(-1, -2).contiguous().transpose(-1, -2)
        case "step":
            return torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device="cuda")[..., ::2]


KINDS = {
    # name: (input, weight, stride, padding, dilation, transposed, output_padding, groups)
    "2d": ((5, 24, 17, 19), (48, 24, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
    "2ds": ((5, 24, 17, 19), (48, 24, 3, 3), [2, 2], [0, 0], [2, 2], False, [0, 0], 1),
    "2d1x1": ((5, 24, 17, 19), (48, 24, 1, 1), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "2done": ((5, 24, 1, 1), (48, 24, 1, 1), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "2drgb": ((5, 3, 32, 32), (48, 3, 16, 16), [16, 16], [0, 0], [1, 1], False, [0, 0], 1),
    "2dc1": ((5, 1, 32, 32), (48, 1, 3, 3), [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
    "2dg": ((5, 24, 17, 19), (48, 6, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 4),
    "2dt": ((5, 24, 17, 19), (24, 48, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
    "2dtg": ((5, 24, 17, 19), (24, 12, 3, 3), [2, 2], [1, 1], [1, 1], True, [1, 1], 4),
    "2dtop": ((5, 24, 17, 19), (24, 48, 3, 3), [1, 1], [1, 1], [2, 2], True, [1, 1], 1),
    "dw": ((5, 24, 17, 19), (24, 1, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 24),
    "dw7": ((5, 24, 17, 19), (24, 1, 7, 7), [1, 1], [3, 3], [1, 1], False, [0, 0], 24),
    "dwm": ((5, 24, 17, 19), (48, 1, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 24),
    "dw32": ((5, 32, 17, 17), (32, 1, 3, 3), [1, 1], [1, 1], [1, 1], False, [0, 0], 32),
    "dw512": ((5, 512, 17, 17), (512, 1, 3, 3), [2, 2], [1, 1], [1, 1], False, [0, 0], 512),
    "dwd": ((5, 32, 17, 17), (32, 1, 3, 3), [1, 1], [1, 1], [2, 2], False, [0, 0], 32),
    "dwt": ((5, 24, 17, 19), (24, 1, 4, 4), [2, 2], [1, 1], [1, 1], True, [0, 0], 24),
    "1d": ((5, 24, 137), (48, 24, 3), [1], [1], [1], False, [0], 1),
    "1dk1": ((5, 24, 137), (48, 24, 1), [1], [0], [1], False, [0], 1),
    "1dg": ((5, 24, 137), (48, 6, 3), [1], [1], [1], False, [0], 4),
    "1dw": ((5, 24, 137), (24, 1, 3), [1], [1], [1], False, [0], 24),
    "1dw4": ((5, 64, 137), (64, 1, 4), [1], [3], [1], False, [0], 64),
    "1dt": ((5, 24, 137), (24, 48, 4), [2], [1], [1], True, [0], 1),
    "3d": ((2, 8, 9, 11, 13), (16, 8, 3, 3, 3), [1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 1),
    "3dg": ((2, 8, 9, 11, 13), (16, 4, 3, 3, 3), [1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 2),
    "3dw": ((2, 8, 9, 11, 13), (8, 1, 3, 3, 3), [1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 8),
    "3dt": ((2, 8, 9, 11, 13), (8, 16, 3, 3, 3), [2, 2, 2], [1, 1, 1], [1, 1, 1], True, [1, 1, 1], 1),
    "3dp": ((2, 3, 8, 16, 16), (16, 3, 2, 8, 8), [2, 8, 8], [0, 0, 0], [1, 1, 1], False, [0, 0, 0], 1),
}
FORWARD = (
    "c.c",
    "cl.c",
    "c.cl",
    "cl.cl",
    "slice.c",
    "clslice.c",
    "swap.c",
    "step.c",
    "c.slice",
    "c.swap",
    "c.step",
    "slice.cl",
    "clslice.cl",
)
BACKWARD = (
    "c.c.c",
    "cl.c.c",
    "c.cl.c",
    "c.c.cl",
    "c.cl.cl",
    "cl.cl.c",
    "cl.c.cl",
    "cl.cl.cl",
    "expand.c.c",
    "expand.cl.cl",
    "expand_sp.c.c",
    "slice.c.c",
    "c.slice.c",
    "clslice.c.c",
    "c.clslice.c",
    "swap.c.c",
    "c.swap.c",
    "c.c.swap",
    "step.c.c",
    "c.step.c",
    "c.c.step",
    "clslice.cl.cl",
    "cl.clslice.cl",
    "slice.cl.cl",
)


def forward(kind, how, bias):
    x, w, *rest = KINDS[kind]
    out = w[1] * rest[5] if rest[3] else w[0]

    def f(t):
        with torch.no_grad():
            hx, hw = how.split(".")
            aten.convolution(layout(t(*x), hx), layout(t(*w), hw), t(out) if bias else None, *rest)

    f.__name__ = f"kc_fw_{kind}_{how}" + ("_b" if bias else "")
    program(dtypes=TYPES if how in ("c.c", "cl.cl", "cl.c") else TYPES[:3])(f)


def backward(kind, how, mask):
    x, w, *rest = KINDS[kind]
    out = w[1] * rest[5] if rest[3] else w[0]
    meta = aten.convolution(torch.empty(x, device="meta"), torch.empty(w, device="meta"), None, *rest)

    def f(t):
        with torch.no_grad():
            hg, hx, hw = how.split(".")
            aten.convolution_backward(
                layout(t(*meta.shape), hg),
                layout(t(*x), hx),
                layout(t(*w), hw),
                [out],
                *rest,
                [bool(int(m)) for m in mask],
            )

    f.__name__ = f"kc_bw_{kind}_{how}_{mask}"
    program(dtypes=TYPES if how in ("c.c.c", "cl.cl.cl") else TYPES[:3])(f)


for _k in KINDS:
    for _h in FORWARD:
        if "3d" in _k and "swap" in _h:
            pass
        forward(_k, _h, False)
    forward(_k, "c.c", True)
    forward(_k, "cl.cl", True)
    for _h in BACKWARD:
        backward(_k, _h, "110")
    for _m in ("100", "010", "111", "001", "011", "101"):
        backward(_k, "c.c.c", _m)
        backward(_k, "cl.cl.cl", _m)
