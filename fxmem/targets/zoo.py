"""``torchvision:NAME`` and ``timm:NAME``: models by name, without weights."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from fxmem.errors import MissingExtraError, SourceError
from fxmem.targets.made import Made, nearest
from fxmem.targets.userfile import check_arguments, explained

_ARGUMENT = "check the names and values given with --model-arg"
_EXTRAS = {"transformers": "hf"}  # where fxmem's extra is not named for the package


def extra(name: str, target: str) -> Any:
    """Import a package that only some targets need.

    Args:
        name: The package.
        target: For the message.

    Raises:
        MissingExtraError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingExtraError(
            f"the package {name} is not installed", where=target, hint=f'pip install "fxmem[{_EXTRAS.get(name, name)}]"'
        ) from error


def from_torchvision(name: str, arguments: Mapping[str, object]) -> Made:
    """Build a torchvision model; ``arguments`` are its builder's keywords.

    Raises:
        SourceError: The name or an argument is unknown, or the builder failed.
    """
    where = f"torchvision:{name}"
    extra("torchvision", where)
    models = extra("torchvision.models", where)
    try:
        builder = models.get_model_builder(name)
    except ValueError:
        hint = nearest(name.lower(), models.list_models()) or "torchvision.models.list_models() lists them"
        raise SourceError(f"torchvision has no model {name!r}", where=where, hint=hint) from None
    keywords: dict[str, Any] = {"weights": None, **arguments}
    if "weights_backbone" in inspect.signature(builder).parameters:
        keywords.setdefault("weights_backbone", None)
    check_arguments(builder, keywords, where)
    with explained(None, where, f"building {name}", hint=_ARGUMENT):
        return Made(module=builder(**keywords), name=where)


def from_timm(name: str, arguments: Mapping[str, object]) -> Made:
    """Build a timm model; ``arguments`` go to ``timm.create_model``.

    Raises:
        SourceError: The name is unknown, or the factory failed.
    """
    where = f"timm:{name}"
    timm = extra("timm", where)
    if not timm.is_model(name.partition(".")[0]):
        hint = nearest(name, timm.list_models()) or "timm.list_models() lists them"
        raise SourceError(f"timm has no model {name!r}", where=where, hint=hint)
    with explained(None, where, f"building {name}", hint=_ARGUMENT):
        return Made(module=timm.create_model(name, pretrained=False, **arguments), name=where)
