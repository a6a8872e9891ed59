"""``hf:TYPE`` and ``hf:PATH/config.json``: transformers models from their configuration. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fxmem.errors import SourceError
from fxmem.targets.made import Made, nearest, torch_dtype
from fxmem.targets.userfile import explained
from fxmem.targets.zoo import extra
from fxmem.workload import Workload

_ARGUMENT = "--model-arg KEY=VALUE sets a value of the configuration"


def from_hf(name: str, workload: Workload) -> Made:
    """Build a transformers model with ``from_config``.

    Args:
        name: A model type (``gpt2``), a ``config.json`` or a folder that holds one.
        workload: Gives configuration values (``model_args``), dtype and attention implementation.

    Raises:
        SourceError: The type, the file or a configuration value is unknown, or the model failed.
    """
    where = f"hf:{name}"
    with _offline():
        transformers = extra("transformers", where)
        with _quiet(transformers), explained(None, where, "building the model", hint=_ARGUMENT):
            config = _config(transformers, name, dict(workload.model_args), where)
            keywords: dict[str, Any] = {"dtype": torch_dtype(workload.dtype)}
            if workload.attn:
                keywords["attn_implementation"] = workload.attn
            with _no_init(transformers):
                module = _from_config(transformers, config, keywords)
        return Made(module=module, name=where, scope=lambda: _quiet(transformers))


def _config(transformers: Any, name: str, values: dict[str, object], where: str) -> Any:
    given = _read(Path(name), where) if _is_path(name) else {"model_type": name}
    kind = str(given.pop("model_type", ""))
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if kind not in known:
        hint = nearest(kind, known.keys()) or "hf:TYPE is a model_type of transformers, such as gpt2, llama, bert, vit"
        if not kind:
            raise SourceError("the configuration has no model_type", where=where, hint="add it, for example llama")
        raise SourceError(f"transformers has no model type {kind!r}", where=where, hint=hint)
    default = known[kind]()
    for key in values:
        if not hasattr(default, key.partition(".")[0]):
            hint = nearest(key, default.to_dict()) or f"see {type(default).__name__} for its values"
            raise SourceError(f"the configuration of {kind} has no value {key!r}", where=where, hint=hint)
    config = transformers.AutoConfig.for_model(kind, **_merged(given, values, default.to_dict()))
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    if getattr(config, "use_pretrained_backbone", False):  # would download weights
        config.use_pretrained_backbone = False
    return config


def _is_path(name: str) -> bool:
    return name.endswith(".json") or "/" in name or os.sep in name or Path(name).is_dir()


def _read(path: Path, where: str) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise SourceError(
            f"there is no file {file}",
            where=where,
            hint="fxmem downloads nothing: give a local config.json, or a model type such as hf:llama",
        )
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SourceError(f"{file} is no JSON: {error}", where=where, hint="correct the file") from error
    if not isinstance(read, dict):
        raise SourceError(f"{file} holds no JSON object", where=where, hint="give a model's config.json")
    return read


def _merged(given: dict[str, Any], values: Mapping[str, object], default: Mapping[str, Any]) -> dict[str, Any]:
    """The file's values with the user's; ``vision_config.depth`` reaches into a part."""
    merged = dict(given)
    for key, value in values.items():
        part, _, inner = key.partition(".")
        if inner:
            merged[part] = {**(default.get(part) or {}), **merged.get(part, {}), inner: value}
        else:
            merged[key] = value
    return merged


def _from_config(transformers: Any, config: Any, keywords: dict[str, Any]) -> Any:
    named = [getattr(transformers, n, None) for n in getattr(config, "architectures", None) or ()]
    if named and named[0] is not None:  # a config.json says which class its weights are for
        return named[0]._from_config(config, **keywords)
    if type(config) in transformers.AutoModelForCausalLM._model_mapping:
        return transformers.AutoModelForCausalLM.from_config(config, **keywords)
    if type(config) in transformers.AutoModel._model_mapping:
        return transformers.AutoModel.from_config(config, **keywords)
    for auto in ("AutoModelForSeq2SeqLM", "AutoModelForImageTextToText", "AutoModelForSpeechSeq2Seq"):
        mapping = getattr(transformers, auto, None)
        if mapping is not None and type(config) in mapping._model_mapping:
            return mapping.from_config(config, **keywords)
    return transformers.AutoModel.from_config(config, **keywords)  # says what it knows


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    old = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    constants: Any = sys.modules.get("huggingface_hub.constants")
    before = getattr(constants, "HF_HUB_OFFLINE", None)
    if constants is not None:  # it read the variable when it was imported
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        if old is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = old
        if constants is not None:
            constants.HF_HUB_OFFLINE = before


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    logs = transformers.utils.logging
    old = logs.get_verbosity()
    logs.set_verbosity_error()
    try:
        yield
    finally:
        logs.set_verbosity(old)


def _nothing(*_args: object, **_kwargs: object) -> None:
    pass


@contextlib.contextmanager
def _no_init(transformers: Any) -> Iterator[None]:
    """No walk over the modules to initialise them; ``init_weights`` itself must run, it ties weights."""
    model: Any = transformers.PreTrainedModel
    original = vars(model).get("initialize_weights")
    if original is None:  # before 4.50: each call skips fake weights by itself
        yield
        return
    model.initialize_weights = _nothing
    try:
        yield
    finally:
        model.initialize_weights = original
