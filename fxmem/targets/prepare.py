"""Changes to a model before it runs: weights' dtype, memory format, activation checkpointing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fxmem.errors import SourceError, UsageError

_BLOCKS = frozenset(
    {
        "BasicBlock", "Bottleneck", "EncoderBlock", "CNBlock", "SwinTransformerBlock", "MBConv", "InvertedResidual",
        "TransformerEncoderLayer", "TransformerDecoderLayer",
    }
)  # fmt: skip
"""Class names of torchvision's and torch's repeated blocks. Where a model has them, these and no others
are checkpointed, as in the measured truth (``phantom/measure.py``)."""


def cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Give float32 and float64 parameters and buffers this dtype; what is half already stays."""
    module._apply(lambda t: t.to(dtype) if t.dtype in (torch.float32, torch.float64) else t)


def channels_last(module: nn.Module) -> None:
    """Lay 4-D weights out as channels last.

    Raises:
        UsageError: The model has 5-D weights, which have no such layout.
    """
    if any(p.dim() == 5 for p in module.parameters()):
        raise UsageError("--channels-last is for images; this model has 5-D weights", hint="leave the option out")
    module.to(memory_format=torch.channels_last)


def checkpointing(module: nn.Module, where: str) -> None:
    """Recompute the activations of each repeated block in the backward pass.

    Raises:
        SourceError: The model refuses, or has no repeated block.
    """
    for name in ("gradient_checkpointing_enable", "set_grad_checkpointing"):  # transformers, timm
        switch: Callable[..., object] | None = getattr(module, name, None)
        if switch is None:
            continue
        try:
            switch()
        except (AssertionError, ValueError, AttributeError, NotImplementedError) as error:
            raise SourceError(
                f"{type(module).__name__} has no activation checkpointing ({error})",
                where=where,
                hint="leave --checkpoint out",
            ) from error
        return
    blocks = [m for m in module.modules() if type(m).__name__ in _BLOCKS] or list(_repeated(module))
    if not blocks:
        raise SourceError(
            f"{type(module).__name__} has no repeated block to checkpoint: no class with several instances in one "
            "Sequential or ModuleList",
            where=where,
            hint="leave --checkpoint out, or call torch.utils.checkpoint in the model's forward",
        )
    for block in blocks:
        _wrap(block)


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    """Outermost modules that share a container with another instance of their class."""
    for child in module.children():
        kinds: list[type] = []
        if isinstance(module, (nn.Sequential, nn.ModuleList)):
            kinds = [type(m) for m in module if _is_block(m)]
        if kinds.count(type(child)) > 1:
            yield child
        else:
            yield from _repeated(child)


def _is_block(module: nn.Module) -> bool:
    own = not type(module).__module__.startswith("torch.nn.")
    composite = own or any(True for _ in module.children())
    container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)) and not own
    return composite and not container and any(True for _ in module.parameters())


def _wrap(block: nn.Module) -> None:
    forward: Callable[..., Any] = block.forward

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Tensor | Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.forward = recomputed
