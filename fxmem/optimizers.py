"""Optimizers by name. Which implementation runs is left to torch, which decides as on CUDA."""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import Any

import torch

from fxmem.errors import UsageError

_NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {"lr": 0.1}),
    "sgd-momentum": ("sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}),
    "sgd-nesterov": ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}),
    "adam-amsgrad": ("adam", {"amsgrad": True}),
    "adamw-amsgrad": ("adamw", {"amsgrad": True}),
    "rmsprop-momentum": ("rmsprop", {"momentum": 0.9}),
    "rmsprop-centered": ("rmsprop", {"momentum": 0.9, "centered": True}),
}
_SUFFIXES = ("fused", "capturable", "foreach")
_NEEDS_CLOSURE = "its step needs a closure"
_UNUSABLE = {"lbfgs": _NEEDS_CLOSURE, "sparseadam": "it takes sparse gradients only"}


def _classes() -> dict[str, type[torch.optim.Optimizer]]:
    return {
        name.lower(): cls
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    }


def optimizer_names() -> list[str]:
    """Every name without a suffix that :func:`make_optimizer` takes, ``none`` aside."""
    return sorted((set(_classes()) | set(_NAMED)) - set(_UNUSABLE))


def make_optimizer(name: str, params: list[torch.nn.Parameter], *, foreach: bool) -> torch.optim.Optimizer | None:
    """Build the optimizer called ``name``.

    Args:
        name: A class of ``torch.optim`` in lower case, a variant such as ``sgd-momentum``, or ``none``; with
            ``-fused``, ``-foreach`` or ``-capturable`` for those implementations. Or ``package.module:NAME``: called
            with the parameters, makes the user's own optimizer.
        params: The model's parameters.
        foreach: Whether the multi-tensor implementation may be chosen; ``False`` forces the single-tensor one.

    Raises:
        UsageError: Unknown name, or the class has no such implementation, or cannot take these parameters.
    """
    if name.lower() == "none":
        return None
    if not params:
        raise UsageError("the model has no parameters to train", hint="use --mode inference or --optimizer none")
    if ":" in name:
        return _own(name, params)
    base, options = _parsed(name)
    cls = _classes().get(base)
    if base in _UNUSABLE:
        raise UsageError(f"--optimizer {name} cannot be run: {_UNUSABLE[base]}", hint="choose another one")
    if cls is None:
        raise UsageError(f"--optimizer {name} is unknown", hint=_hint(name))
    accepted = inspect.signature(cls).parameters
    wrong = [key for key in options if key not in accepted]
    if wrong:
        raise UsageError(f"--optimizer {name}: torch.optim.{cls.__name__} has no {wrong[0]} option")
    if not foreach and "foreach" in accepted and not {"fused", "foreach"} & set(options):
        options["foreach"] = False
    try:
        return cls(params, **options)
    except ValueError as error:  # Muon takes matrices only
        raise UsageError(f"--optimizer {name}: {error}", hint="choose another optimizer for this model") from error


def _own(name: str, params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The user's optimizer. Modules beside ``model.py`` are found by name, since the run is in its scope."""
    module, _, attribute = name.partition(":")
    module = module.removesuffix(".py")  # as a target is written
    hint = "name a class or function as package.module:NAME that is called with the parameters alone"
    try:
        made = getattr(importlib.import_module(module), attribute)(params)
    except Exception as error:
        raise UsageError(f"--optimizer {name}: {type(error).__name__}: {error}", hint=hint) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(f"--optimizer {name} gave {type(made).__name__}, not a torch.optim.Optimizer", hint=hint)
    closure = inspect.signature(made.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(f"--optimizer {name} cannot be run: {_NEEDS_CLOSURE}", hint="choose another one")
    return made


def _parsed(name: str) -> tuple[str, dict[str, Any]]:
    """Class name and options."""
    base, options = name.lower(), {}
    for suffix in _SUFFIXES * len(_SUFFIXES):
        if base.endswith(f"-{suffix}"):
            base = base.removesuffix(f"-{suffix}")
            options[suffix] = True
    kind, preset = _NAMED.get(base, (base, {}))
    return kind, {**preset, **options}


def _hint(name: str) -> str:
    names = optimizer_names()
    near = difflib.get_close_matches(name.lower(), names)
    if near:
        return f"did you mean {', '.join(near)}?"
    return f"known are {', '.join(names)}, none; with -fused, -foreach or -capturable; or package.module:NAME"
