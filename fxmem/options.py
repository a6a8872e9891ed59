"""The command line's words, parsed once into a Workload and a Device. No torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from fxmem.device import Device, find_device
from fxmem.errors import UsageError
from fxmem.report import FORMATS
from fxmem.units import parse_size
from fxmem.workload import AMP_DTYPES, FLOAT_DTYPES, ConvWorkspace, InputSpec, Mode, Vary, Workload, ZeroGrad

Command = TypeVar("Command", bound=Callable[..., Any])

_DEFAULTS = Workload()


def parse_input(text: str) -> InputSpec:
    """Read ``--input``.

    Args:
        text: ``[NAME=]SHAPE[:DTYPE]`` without the batch dimension; an empty shape is one
            number per sample.

    Raises:
        UsageError: The text is no shape.

    >>> parse_input("input_ids=128:int64")
    InputSpec(name='input_ids', shape=(128,), dtype='int64')
    >>> parse_input("3x224x224").shape
    (3, 224, 224)
    >>> parse_input("labels=:int64").shape
    ()
    """
    name, equals, rest = text.rpartition("=")
    shape, colon, dtype = rest.partition(":")
    sizes = shape.split("x") if shape else []
    well_named = not equals or name.isidentifier()
    if not (rest and well_named and all(size.isdecimal() for size in sizes) and bool(colon) == bool(dtype)):
        raise UsageError(
            f"{text!r} is not an input",
            where="--input",
            hint="write it as [NAME=]SHAPE[:DTYPE] without the batch: 3x224x224, input_ids=128:int64",
        )
    return InputSpec(name or None, tuple(map(int, sizes)), dtype.removeprefix("torch.") or None)


def parse_assignment(text: str) -> tuple[str, object]:
    """Read ``--model-arg``; a value that is no Python literal is a string.

    >>> parse_assignment("layers=[3, 4]"), parse_assignment("act=gelu")
    (('layers', [3, 4]), ('act', 'gelu'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise UsageError(f"{text!r} is not KEY=VALUE", where="--model-arg", hint="write it as depth=12")
    try:
        return key.strip(), ast.literal_eval(value.strip())
    except (ValueError, SyntaxError):
        return key.strip(), _WORDS.get(value.strip().lower(), value)


def parse_vary(text: str) -> Vary:
    """Read ``--vary``.

    >>> parse_vary("seq=128..32768")
    Vary(axis='seq', first=128, last=32768)
    """
    match = re.fullmatch(r"(seq|image)=(\d+)\.\.(\d+)", text.strip())
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        raise UsageError(f"{text!r} is no range", where="--vary", hint="write seq=128..32768 or image=64..4096")
    return Vary(match[1], int(match[2]), int(match[3]))


def _memory(option: str) -> Callable[[str], int]:
    """Reads the size that an option takes. A small number without a unit lacks one: nobody means 450 bytes."""

    def parse(text: str) -> int:
        nbytes, number = parse_size(text), text.strip()
        if 0 < nbytes < 2**20 and not number[-1].isalpha():
            raise UsageError(
                f"{text!r} is {nbytes} bytes", where=option, hint=f"write the unit: {number}MiB or {number}GiB"
            )
        return nbytes

    return parse


_WORDS: Mapping[str, object] = {"true": True, "false": False, "null": None}

_WORKLOAD = (
    click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Samples in a batch."),
    click.option("--mode", type=click.Choice(tuple(map(str, Mode))), default=str(Mode.INFERENCE), show_default=True,
                 help="How the model is used."),
    click.option("--dtype", type=click.Choice(FLOAT_DTYPES), default=_DEFAULTS.dtype, show_default=True,
                 help="Of the weights and floating inputs."),
    click.option("--amp", type=click.Choice(AMP_DTYPES), help="Autocast to this type."),
    click.option("--optimizer", metavar="NAME", default=_DEFAULTS.optimizer, show_default=True,
                 help="sgd, sgd-momentum, adam, adamw, adamw-fused, ..., or package.module:NAME."),
    click.option("--input", "inputs", type=parse_input, multiple=True, metavar="[NAME=]SHAPE[:DTYPE]",
                 help="An input without the batch: 3x224x224, input_ids=128:int64. Repeatable."),
    click.option("--image", type=click.IntRange(min=1), metavar="N",
                 help=f"Image height and width.  [default: the model's own, else {_DEFAULTS.image}]"),
    click.option("--seq", type=click.IntRange(min=1), metavar="N",
                 help=f"Tokens in a sample.  [default: the target's own, else {_DEFAULTS.seq}]"),
    click.option("--model-arg", "model_args", type=parse_assignment, multiple=True, metavar="KEY=VALUE",
                 help="Keyword of the factory, or value of the config. Repeatable."),
    click.option("--attn", type=click.Choice(("eager", "sdpa")), help="Attention of transformers models."),
    click.option("--channels-last", is_flag=True, help="Use the channels-last memory format."),
    click.option("--checkpoint", is_flag=True, help="Recompute activations in the backward pass."),
    click.option("--accumulate", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
                 help="Micro-batches in a step."),
    click.option("--clip", is_flag=True, help="Clip the gradients' norm before the optimizer's step."),
    click.option("--zero-grad", type=click.Choice(tuple(map(str, ZeroGrad))), default=str(ZeroGrad.AFTER_STEP),
                 show_default=True, help="When old gradients go; in-place: set_to_none=False."),
    click.option("--steps", type=click.IntRange(min=1), metavar="N",
                 help="Steps of the loop.  [default: 3 in training, else 2]"),
    click.option("--no-foreach", is_flag=True, help="Let the optimizer go tensor by tensor."),
    click.option("--conv-workspace", type=click.Choice(tuple(map(str, ConvWorkspace))),
                 default=str(ConvWorkspace.AUTO), show_default=True, help="Whether cuDNN's workspaces count."),
    click.option("--prompt", type=click.IntRange(min=1), metavar="N",
                 help="Prompt tokens in generation.  [default: --seq]"),
    click.option("--new-tokens", type=click.IntRange(min=1), default=_DEFAULTS.new_tokens, show_default=True,
                 metavar="N", help="Tokens to generate."),
)  # fmt: skip

_DEVICE = (
    click.option("--device", metavar="NAME|SIZE",
                 help="The GPU, or its memory: t4, rtx-4090, 24GiB.  [default: h200's rules without a limit]"),
    click.option("--arch", metavar="sm_XX", help="Architecture, where it is not the device's."),
    click.option("--context", type=_memory("--context"), metavar="SIZE", help="Size of the CUDA context."),
    click.option("--safety", type=click.FloatRange(0.0, 1.0, min_open=True), metavar="F",
                 help="Share of the memory that the largest batch may use.  [default: 0.9]"),
    click.option("--reserve", type=_memory("--reserve"), metavar="SIZE", help="Memory of the device that others use."),
)  # fmt: skip

_OUTPUT = (
    click.option("--format", "format_name", type=click.Choice(FORMATS), default=FORMATS[0], show_default=True,
                 help="How to write the report."),
    click.option("--output", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE",
                 help="Write the report there instead of to the terminal."),
    click.option("--debug", is_flag=True, help="Show tracebacks and the libraries' warnings."),
)  # fmt: skip


def shared_options(command: Command) -> Command:
    """Give a command the options of every command that takes a target."""
    for option in reversed((*_WORKLOAD, *_DEVICE, *_OUTPUT)):
        command = option(command)
    return command


def parse_batches(text: str) -> tuple[int, ...]:
    """Read ``--batches``.

    >>> parse_batches("1,2,4")
    (1, 2, 4)
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(f"{text!r} is no list of batches", where="--batches", hint="write it as 1,2,4,8")
    return tuple(map(int, words))


_CALIBRATION = (
    click.option("--batches", type=parse_batches, default="1,2,4,8", show_default=True, metavar="N,N,...",
                 help="Batch sizes, each in a process of its own."),
    click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, metavar="N",
                 help="Runs at each batch size."),
    click.option("--device", default="cuda:0", show_default=True, metavar="cuda:N", help="The GPU to run on."),
    click.option("--limit", type=click.FloatRange(min=1), default=120, show_default=True, metavar="SECONDS",
                 help="Start nothing after this time."),
    click.option("--output", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
                 help="Write the receipt there.  [default: calibration/receipts/TARGET-MODE.json]"),
    _OUTPUT[0],
    _OUTPUT[-1],
)  # fmt: skip


def calibration_options(command: Command) -> Command:
    """Give a command the workload's options, without a batch, and those of a calibration."""
    for option in reversed((*_WORKLOAD[1:], *_CALIBRATION)):
        command = option(command)
    return command


def verify_options(command: Command) -> Command:
    """Give a command the workload's options and those of a report."""
    for option in reversed((*_WORKLOAD, *_OUTPUT)):
        command = option(command)
    return command


def workload_from(options: Mapping[str, Any]) -> Workload:
    """The workload that the options ask for.

    Raises:
        UsageError: Two options contradict each other, or a value is out of range.
    """
    named = [spec.name for spec in options["inputs"] if spec.name is not None]
    if repeated := {name for name in named if named.count(name) > 1}:
        raise UsageError(f"--input names {', '.join(sorted(repeated))} twice")
    axes = {name: options[name] for name in ("image", "seq") if options[name] is not None}
    same = ("batch", "dtype", "amp", "optimizer", "inputs", "model_args", "attn", "channels_last", "checkpoint")
    also = ("accumulate", "clip", "zero_grad", "steps", "prompt", "new_tokens")
    return Workload(
        mode=Mode(options["mode"]),
        **axes,
        image_given="image" in axes,
        seq_given="seq" in axes,
        foreach=not options["no_foreach"],
        conv_workspace=ConvWorkspace(options["conv_workspace"]),
        **{name: options[name] for name in (*same, *also)},
    )


def device_from(options: Mapping[str, Any]) -> Device:
    """The device that the options name.

    Raises:
        UsageError: No such device, size or architecture.
    """
    return find_device(options["device"], arch=options["arch"], context=options["context"])


def devices_from(options: Mapping[str, Any]) -> list[Device]:
    """The devices that the options name, with commas between them.

    Raises:
        UsageError: None is named, or one is not known.
    """
    names = [name for name in (options["device"] or "").split(",") if name.strip()]
    if not names:
        raise UsageError("the largest batch needs a limit", where="--device", hint="name a GPU or a size such as 24GiB")
    return [find_device(name, arch=options["arch"], context=options["context"]) for name in names]
