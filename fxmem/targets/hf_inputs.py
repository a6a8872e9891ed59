"""Inputs for transformers models: text, images, audio, pairs of text and image."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from fxmem.errors import InputError
from fxmem.targets.made import Arguments
from fxmem.workload import Mode, Workload


def hf_arguments(module: nn.Module, workload: Workload, batch: int, dtype: torch.dtype) -> Arguments:
    """Keywords for ``forward``, in the order in which ``phantom/measure.py`` makes them.

    Raises:
        InputError: The model takes something else.
    """
    model: Any = module
    main = getattr(model, "main_input_name", "input_ids")
    takes = inspect.signature(model.forward).parameters
    if main == "pixel_values":
        keywords = {"pixel_values": _pixels(model, workload, batch, dtype)}
        if "decoder_input_ids" in takes and workload.mode is not Mode.GENERATION:
            keywords.update(_decoder(model, _ids(workload, batch), workload))
        elif _is_required(takes, "input_ids"):
            keywords["input_ids"] = _ids(workload, batch)
        return Arguments((), keywords)
    if main in ("input_features", "input_values"):
        keywords = {main: _audio(model, main, batch, workload, dtype)}
        if "decoder_input_ids" in takes and workload.mode is not Mode.GENERATION:
            keywords.update(_decoder(model, _ids(workload, batch), workload))
        return Arguments((), keywords)
    if "input_ids" not in takes:
        raise InputError(
            f"no inputs are known for {type(model).__name__}.forward({', '.join(takes)})",
            hint=f"give them with --input, for example --input {next(iter(takes), 'x')}=128x64",
        )
    return Arguments((), _text(model, workload, batch, dtype, pair="pixel_values" in takes and _is_pair(model)))


def _text(model: Any, workload: Workload, batch: int, dtype: torch.dtype, *, pair: bool) -> dict[str, Any]:
    if pair:  # CLIP and its kind: an encoder each, forward needs both; texts are short
        longest = getattr(getattr(model.config, "text_config", None), "max_position_embeddings", workload.seq)
        ids = torch.zeros(batch, min(workload.seq, longest), dtype=torch.long)
        return {"input_ids": ids, "pixel_values": _pixels(model, workload, batch, dtype)}
    ids = _ids(workload, batch)
    keywords: dict[str, Any] = {"input_ids": ids}
    if workload.training and _has_head(model):
        keywords["labels"] = ids
    if model.config.is_encoder_decoder and "labels" not in keywords and workload.mode is not Mode.GENERATION:
        keywords["decoder_input_ids"] = ids
    return keywords


def _decoder(model: Any, ids: Tensor, workload: Workload) -> dict[str, Any]:
    return {"labels": ids} if workload.training and _has_head(model) else {"decoder_input_ids": ids}


def _has_head(model: Any) -> bool:
    try:
        return model.get_output_embeddings() is not None
    except (AttributeError, NotImplementedError):
        return False


def _is_pair(model: Any) -> bool:
    """Whether text and image have an encoder each, compared by a learnt scale."""
    return hasattr(model, "logit_scale") or hasattr(model, "visual_projection")


def _is_required(takes: Any, name: str) -> bool:
    return name in takes and takes[name].default is inspect.Parameter.empty


def _ids(workload: Workload, batch: int) -> Tensor:
    length = workload.seq
    if workload.mode is Mode.GENERATION and workload.prompt is not None:
        length = workload.prompt
    return torch.zeros(batch, length, dtype=torch.long)


def _pixels(model: Any, workload: Workload, batch: int, dtype: torch.dtype) -> Tensor:
    config = getattr(model.config, "vision_config", None) or model.config
    size: Any = workload.image
    wanted = getattr(config, "image_size", None)
    if not workload.image_given and wanted and _fixed_size(model):
        size = wanted
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", None)
    channels = channels if isinstance(channels, int) else 3
    frames = getattr(config, "num_frames", None)
    shape = (batch, frames, channels, height, width) if isinstance(frames, int) else (batch, channels, height, width)
    pixels = torch.zeros(*shape, dtype=dtype)
    if workload.channels_last and pixels.dim() == 4:
        pixels = pixels.to(memory_format=torch.channels_last)
    return pixels


def _fixed_size(model: nn.Module) -> bool:
    """Whether its embeddings refuse any size but the configuration's, unless asked to interpolate."""
    kinds = {type(m) for m in model.modules()}
    return any("interpolate_pos_encoding" in inspect.signature(kind.forward).parameters for kind in kinds)


def _audio(model: Any, main: str, batch: int, workload: Workload, dtype: torch.dtype) -> Tensor:
    config = model.config
    mels = getattr(config, "num_mel_bins", None)
    if main == "input_values":  # a second of raw sound at 16 kHz, or a spectrogram
        if mels and getattr(config, "max_length", None):
            return torch.zeros(batch, config.max_length, mels, dtype=dtype)
        return torch.zeros(batch, 16_000, dtype=dtype)
    positions = getattr(config, "max_source_positions", None)
    if mels and positions:  # Whisper: its encoder takes 30 seconds, two frames a position
        return torch.zeros(batch, mels, 2 * positions, dtype=dtype)
    width = getattr(config, "feature_projection_input_dim", None) or getattr(config, "input_feat_per_channel", None)
    return torch.zeros(batch, workload.seq, width or mels or 80, dtype=dtype)
