"""Calls of scaled dot product attention, many kinds of them: which back end would serve each?

Run as a script on a CUDA build (a GPU or the phantom device) it prints what PyTorch itself chooses,
one letter a case, in the order of :func:`cases`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


class Shape(NamedTuple):
    batch: int = 2
    heads: int = 4
    keys: int = 4
    values: int = 4
    length: int = 33
    sources: int = 33
    dim: int = 64
    value_dim: int = 64


SHAPES = (
    Shape(), Shape(length=1), Shape(sources=1), Shape(length=1, sources=1), Shape(sources=77),
    Shape(length=128, sources=128),
    Shape(dim=36, value_dim=36), Shape(dim=30, value_dim=30), Shape(dim=4, value_dim=4), Shape(dim=1, value_dim=1),
    Shape(dim=80, value_dim=80), Shape(dim=128, value_dim=128), Shape(dim=192, value_dim=192),
    Shape(dim=200, value_dim=200), Shape(dim=224, value_dim=224), Shape(dim=232, value_dim=232),
    Shape(dim=256, value_dim=256), Shape(dim=264, value_dim=264), Shape(dim=192, value_dim=128),
    Shape(dim=64, value_dim=128), Shape(dim=64, value_dim=36), Shape(keys=2, values=2), Shape(keys=1, values=1),
    Shape(keys=2, values=4), Shape(keys=3, values=3), Shape(length=0),
    Shape(batch=70000, heads=1, keys=1, values=1, length=2),
)  # fmt: skip
LAYOUTS = ("bhsd", "bshd", "packed", "strided", "offset", "3d")
MASKS = ("", "bool", "float", "bias", "3d", "row", "column")
SETTINGS = ("", "flash", "efficient", "math", "cudnn", "efficient,math", "cudnn,efficient", "order")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Case(NamedTuple):
    dtype: torch.dtype
    shape: Shape
    layout: str = "bhsd"
    mask: str = ""
    dropout: float = 0.0
    causal: bool = False
    grad: bool = False
    gqa: bool = False
    setting: str = ""


def cases() -> Iterator[Case]:
    """All cases, always in the same order."""
    for dtype, shape, grad in itertools.product(DTYPES, SHAPES, (False, True)):
        gqa = (False, True) if shape.heads != shape.keys else (False,)
        for layout, mask, dropout, causal in itertools.product(LAYOUTS, MASKS, (0.0, 0.1, 0.125), (False, True)):
            below = layout == "3d" and grad  # ``_fused_sdp_choice`` asks below autograd, where no view needs gradients
            if not (mask and causal) and not below:
                for grouped in gqa:
                    yield Case(dtype, shape, layout, mask, dropout, causal, grad, grouped)
        for setting, mask in itertools.product(SETTINGS[1:], ("", "float")):
            yield Case(dtype, shape, "bhsd", mask, 0.0, False, grad, gqa[-1], setting)


def arguments(case: Case, device: str) -> dict[str, Any]:
    """Tensors and flags for ``torch._fused_sdp_choice``."""
    s = case.shape
    sizes = ((s.heads, s.length, s.dim), (s.keys, s.sources, s.dim), (s.values, s.sources, s.value_dim))
    query, key, value = (_tensor(case, s.batch, *size, device) for size in sizes)
    return {
        "query": query, "key": key, "value": value, "attn_mask": _mask(case, device), "dropout_p": case.dropout,
        "is_causal": case.causal, "enable_gqa": case.gqa,
    }  # fmt: skip


def _tensor(case: Case, batch: int, heads: int, length: int, dim: int, device: str) -> torch.Tensor:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=case.dtype, device=device)

    match case.layout:
        case "bshd":
            x = empty(batch, length, heads, dim).transpose(1, 2)
        case "packed":
            x = empty(batch, length, 3, heads, dim)[:, :, 1].transpose(1, 2)
        case "strided":
            x = empty(batch, heads, length, 2 * dim)[..., ::2]
        case "offset":
            x = empty(batch * heads * length * dim + 2)[2:].view(batch, heads, length, dim)
        case "3d":
            x = empty(heads, length, dim)
        case _:
            x = empty(batch, heads, length, dim)
    return x.requires_grad_(case.grad) if x.is_leaf else x


def _mask(case: Case, device: str) -> torch.Tensor | None:
    s = case.shape
    full = (s.batch, 1, s.length, s.sources)
    match case.mask:
        case "bool":
            return torch.empty(s.length, s.sources, dtype=torch.bool, device=device)
        case "float":
            return torch.empty(full, dtype=case.dtype, device=device)
        case "bias":
            return torch.empty(1, s.heads, *full[2:], dtype=case.dtype, device=device, requires_grad=True)
        case "3d":
            return torch.empty(s.heads, *full[2:], dtype=case.dtype, device=device)
        case "row":
            return torch.empty(s.batch, 1, 1, s.sources, dtype=case.dtype, device=device)
        case "column":
            return torch.empty(s.length, 1, dtype=case.dtype, device=device).expand(s.length, s.sources)
    return None


_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}  # fmt: skip


@contextlib.contextmanager
def setting(name: str) -> Iterator[None]:
    """Back ends allowed, or an order of them, as user code sets it."""
    if not name:
        yield
        return
    order = name == "order"
    names = ("math", "efficient", "flash", "cudnn") if order else tuple(name.split(","))
    with sdpa_kernel([_BACKENDS[n] for n in names], set_priority=order):
        yield


LETTERS = "MFEC"


def chosen() -> str:
    """What PyTorch chooses on this machine's GPU: M, F, E, C, or - where it refuses."""
    letters = []
    for case in cases():
        with setting(case.setting):
            try:
                letters.append(LETTERS[torch._fused_sdp_choice(**arguments(case, "cuda"))])
            except RuntimeError:
                letters.append("-")
    return "".join(letters)


if __name__ == "__main__":
    print(chosen())  # noqa: T201
