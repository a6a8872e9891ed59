"""Inputs that fit a model: from ``--input``, or found for torchvision, timm and transformers models.

Shapes, values and order of allocation are those of ``phantom/measure.py``, which measured the truth.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxmem.errors import InputError
from fxmem.targets.hf_inputs import hf_arguments
from fxmem.targets.made import Arguments, Made, torch_dtype
from fxmem.workload import InputSpec, Workload

_DETECTORS = frozenset({"FasterRCNN", "MaskRCNN", "KeypointRCNN", "RetinaNet", "FCOS", "SSD"})
ARE_ARGUMENTS = (
    "what it returns becomes the arguments: a tensor or other object the only one, a tuple the positional ones,"
    " a dict the keyword ones; to pass one dict, return ({...},)"
)
"""How the values of ``inputs(batch)`` reach the model."""
_FRAMES = 16  # torchvision's video models were trained on clips of 16 frames


def float_dtype(workload: Workload) -> torch.dtype:
    """Of floating inputs: under autocast they are float32."""
    return torch.float32 if workload.amp else torch_dtype(workload.dtype)


def from_specs(specs: tuple[InputSpec, ...], workload: Workload, batch: int) -> Arguments:
    """The tensors that ``--input`` names, all zeros."""
    args, kwargs = [], {}
    for spec in specs:
        dtype = torch_dtype(spec.dtype) if spec.dtype else float_dtype(workload)
        tensor = _layout(torch.zeros(batch, *spec.shape, dtype=dtype), workload)
        if spec.name is None:
            args.append(tensor)
        else:
            kwargs[spec.name] = tensor
    return Arguments(tuple(args), kwargs)


def finder(module: nn.Module, workload: Workload) -> Callable[[int], Arguments]:
    """How to make inputs for a module of a known family.

    Raises:
        InputError: The family is not known.
    """
    origin = {c.__module__.partition(".")[0] for c in type(module).__mro__}
    if "transformers" in origin and hasattr(module, "config"):
        return lambda batch: hf_arguments(module, workload, batch, float_dtype(workload))
    if hasattr(module, "pretrained_cfg") or "timm" in origin:
        return lambda batch: _classified(_image(workload, batch, *_timm_size(module, workload)), batch)
    if "torchvision" in origin:
        return lambda batch: _torchvision(module, workload, batch)
    raise unknown(module)


def named_axes(workload: Workload) -> list[str]:
    """Of ``seq`` and ``image`` those that the user named."""
    given = {"seq": workload.seq_given, "image": workload.image_given}
    return [axis for axis, named in given.items() if named]


def ignored(made: Made, workload: Workload) -> tuple[str, ...]:
    """A sentence for each axis that the user named and that the inputs do not have."""
    name, function = ("inputs", made.inputs) if made.steps is None else ("steps", made.steps)
    notes = []
    for axis in named_axes(workload):
        if workload.inputs:
            why = "the shapes are those of --input"
        elif function is not None:
            takes = axis in inspect.signature(function).parameters
            why = "" if takes else f"{name}(batch) does not take {axis}"
        else:
            why = "" if _has(made.module, workload, axis) else f"the inputs of {made.name} do not have it"
        if why:
            notes.append(f"--{axis} {getattr(workload, axis)} changes nothing: {why}")
    return tuple(notes)


def _has(module: nn.Module, workload: Workload, axis: str) -> bool:
    """Whether another value gives other shapes; they have no bytes."""
    other = replace(workload, **{axis: getattr(workload, axis) + 1})
    with torch.device("meta"):
        shapes = [
            [leaf.shape for leaf in pytree.tree_leaves(finder(module, each)(1)) if isinstance(leaf, Tensor)]
            for each in (workload, other)
        ]
    return shapes[0] != shapes[1]


def _torchvision(module: nn.Module, workload: Workload, batch: int) -> Arguments:
    area = type(module).__module__
    size = workload.image
    if type(module).__name__ in _DETECTORS:
        return _detection(module, workload, batch)
    if ".models.optical_flow" in area:
        size = size if workload.image_given else 256  # RAFT: at least 128, a multiple of 8
        pair = _image(workload, batch, 3, size, size), _image(workload, batch, 3, size, size)
        return Arguments(pair, {})
    if ".models.video" in area:
        if not workload.image_given:
            size = 112 if type(module).__name__ == "VideoResNet" else 224  # its training size
        clip = torch.zeros(batch, 3, _FRAMES, size, size, dtype=float_dtype(workload))
        return _classified(clip, batch)
    if not workload.image_given and isinstance(getattr(module, "image_size", None), int):
        size = int(module.image_size)  # type: ignore[arg-type]  # a vision transformer takes no other
    return _classified(_image(workload, batch, 3, size, size), batch)


def _detection(module: nn.Module, workload: Workload, batch: int) -> Arguments:
    size = workload.image
    images = [torch.zeros(3, size, size, dtype=float_dtype(workload)) for _ in range(batch)]
    if not workload.training:
        return Arguments((images,), {})
    targets = []
    for _ in range(batch):
        target = {"boxes": torch.tensor([[10.0, 10.0, 100.0, 100.0]], dtype=torch.float32)}
        target["labels"] = torch.ones(1, dtype=torch.long)
        if type(module).__name__ == "MaskRCNN":
            target["masks"] = torch.zeros(1, size, size, dtype=torch.uint8)
        if type(module).__name__ == "KeypointRCNN":
            target["keypoints"] = torch.full((1, 17, 3), 50.0, dtype=torch.float32)
        targets.append(target)
    return Arguments((images, targets), {})


def _timm_size(module: nn.Module, workload: Workload) -> tuple[int, int, int]:
    given = dict(workload.model_args)
    config: dict[str, Any] = dict(getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None) or {})
    channels, height, width = config.get("input_size") or (3, 224, 224)
    channels = _integer(given.get("in_chans"), channels)
    if workload.image_given:
        return channels, workload.image, workload.image
    if "img_size" in given:
        height = width = _integer(given["img_size"], workload.image)
    elif not config.get("fixed_input_size"):
        height = width = workload.image
    return channels, height, width


def _integer(value: object, default: int) -> int:
    return value if isinstance(value, int) else default


def _image(workload: Workload, batch: int, channels: int, height: int, width: int) -> Tensor:
    return _layout(torch.zeros(batch, channels, height, width, dtype=float_dtype(workload)), workload)


def _layout(tensor: Tensor, workload: Workload) -> Tensor:
    if workload.channels_last and tensor.dim() == 4 and tensor.is_floating_point():
        return tensor.to(memory_format=torch.channels_last)
    return tensor


def _classified(image: Tensor, batch: int) -> Arguments:
    return Arguments((image,), {}, torch.zeros(batch, dtype=torch.long))


def unknown(module: nn.Module) -> InputError:
    """No inputs are known: what ``forward`` takes, and an option that would fit."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    shape = _example(module)
    options = f"--input {shape}"
    if len(needed) > 1:
        options = " ".join(f"--input {p.name}={shape}" for p in needed)
    return InputError(
        f"no inputs are known for {type(module).__name__}.forward({', '.join(str(p) for p in parameters)})",
        hint=f"give shapes without the batch dimension, for example {options}; or define inputs(batch) in the file",
    )


def _example(module: nn.Module) -> str:
    """A shape that the first layer with weights would take."""
    for layer in module.modules():
        match layer:
            case nn.Embedding():
                return "128:int64"
            case nn.Linear():
                return str(layer.in_features)
            case nn.Conv1d():
                return f"{layer.in_channels}x1024"
            case nn.Conv2d():
                return f"{layer.in_channels}x224x224"
            case nn.Conv3d():
                return f"{layer.in_channels}x16x112x112"
            case nn.RNNBase():
                return f"128x{layer.input_size}"
    return "3x224x224"
