"""Fourier transforms: plans, stages and copies, by dimensions, strides and dtype. Imported by ``kernel_probe.py``."""

import torch
from kernel_probe import FLOATS, program

DIMS = (
    (-1,),
    (0,),
    (1,),
    (-2, -1),
    (1, 3),
    (0, 1),
    (1, 0),
    (0, 1, 2),
    (1, 2, 3),
    (3, 1, 2),
    (0, 1, 2, 3),
    (3, 2, 1, 0),
)
"""Of four: one plan takes up to three, unless they begin with 0 and 1."""

SHAPES = {
    "dense": lambda t, **k: t(16, 8, 64, 32, **k),
    "odd": lambda t, **k: t(7, 6, 33, 30, **k),
    "transposed": lambda t, **k: t(16, 64, 32, 8, **k).permute(0, 3, 1, 2),
    "sliced": lambda t, **k: t(16, 8, 64, 48, **k)[..., :32],
    "apart": lambda t, **k: t(16, 8, 80, 32, **k)[:, :, 3:67],
    "expanded": lambda t, **k: t(1, 8, 64, 32, **k).expand(16, -1, -1, -1),
    "one": lambda t, **k: t(1, 1, 64, 32, **k),
}


def call(name, f, dtypes):
    def g(t):
        with torch.no_grad():
            f(t)

    g.__name__ = "kf_" + name
    program(dtypes=dtypes)(g)


SINGLE = (torch.float32,)
for _shape, _make in SHAPES.items():
    for _dims in DIMS:
        _label = f"{_shape}_{''.join(str(d % 4) for d in _dims)}"
        _dtypes = FLOATS if _shape in ("dense", "sliced", "transposed") else (torch.float32, torch.bfloat16)
        call("rfftn_" + _label, lambda t, m=_make, d=_dims: torch.fft.rfftn(m(t), dim=d), _dtypes)
        call(
            "fftn_" + _label,
            lambda t, m=_make, d=_dims: torch.fft.fftn(m(t, dtype=torch.complex64), dim=d, norm="ortho"),
            SINGLE,
        )
        call(
            "irfftn_" + _label,
            lambda t, m=_make, d=_dims: torch.fft.irfftn(m(t, dtype=torch.complex64), dim=d),
            SINGLE,
        )
        if len(_dims) == 1:
            call("fft_" + _label, lambda t, m=_make, d=_dims: torch.fft.fft(m(t), dim=d[0]), _dtypes)
            call("ifft_" + _label, lambda t, m=_make, d=_dims: torch.fft.ifft(m(t), n=128, dim=d[0]), _dtypes)
            call("hfft_" + _label, lambda t, m=_make, d=_dims: torch.fft.hfft(m(t), n=64, dim=d[0]), SINGLE)
            call("ihfft_" + _label, lambda t, m=_make, d=_dims: torch.fft.ihfft(m(t), dim=d[0]), _dtypes)


def kf_layer(t):
    x = t(8, 16, 64, 64, grad=True)
    y = torch.fft.rfft2(x) * t(16, 64, 33, grad=True)
    return torch.fft.irfft2(y, s=(64, 64))


def kf_stft(t):
    return torch.stft(t(4, 16000, grad=True), 512, 128, window=t(512), return_complex=True)


program(dtypes=(torch.float32, torch.float64))(kf_layer)
program(dtypes=SINGLE)(kf_stft)
