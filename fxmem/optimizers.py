"""Optimizers by name, with the implementation that CUDA would choose by default."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

import torch

from fxmem.errors import UsageError

_SPECIAL: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "sgd-momentum": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4},
}
_NEEDS_MORE = {"lbfgs"}  # its step needs a closure


def _classes() -> dict[str, type[torch.optim.Optimizer]]:
    return {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }


def make_optimizer(name: str, params: list[torch.nn.Parameter], *, foreach: bool) -> torch.optim.Optimizer | None:
    """Build the optimizer called ``name``.

    Args:
        name: A class of ``torch.optim`` in lower case, ``sgd-momentum``, or ``none``; with
            ``-fused`` or ``-capturable`` for those implementations.
        params: The model's parameters.
        foreach: Whether the multi-tensor implementation is allowed (CUDA's default).

    Raises:
        UsageError: Unknown name, or the class has no such implementation.
    """
    if name == "none":
        return None
    base, options = name.lower(), dict(_SPECIAL.get(name.lower(), {}))
    for suffix in ("fused", "capturable"):
        if base.endswith(f"-{suffix}"):
            base = base.removesuffix(f"-{suffix}")
            options = {**_SPECIAL.get(base, {}), suffix: True}
    classes = _classes()
    cls = classes.get("sgd" if base == "sgd-momentum" else base)
    if cls is None or base in _NEEDS_MORE:
        near = difflib.get_close_matches(base, [*classes, *_SPECIAL])
        known = ", ".join(near) if near else ", ".join(sorted(set(classes) - _NEEDS_MORE))
        raise UsageError(f"--optimizer {name} is unknown", hint=f"did you mean {known}?")
    accepted = inspect.signature(cls).parameters
    wrong = [key for key in options if key not in accepted]
    if wrong:
        raise UsageError(f"--optimizer {name}: torch.optim.{cls.__name__} has no {wrong[0]} implementation")
    if "foreach" in accepted and "fused" not in options:
        options["foreach"] = foreach
    return cls(params, **options)
