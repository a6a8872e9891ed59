"""What is run: mode, batch, precision, optimizer, steps. Plain values, no torch."""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from fxmem.errors import UsageError


class Mode(str, enum.Enum):
    """How the model is used."""

    INFERENCE = "inference"
    TRAINING = "training"
    GENERATION = "generation"

    __str__ = str.__str__


class ConvWorkspace(str, enum.Enum):
    """Whether cuDNN's convolution workspaces are counted."""

    AUTO = "auto"
    NONE = "none"

    __str__ = str.__str__


class ZeroGrad(str, enum.Enum):
    """Where the training loop rids itself of the gradients of the step before."""

    AFTER_STEP = "after-step"
    """Set to None after the optimizer's step: the reference loop."""
    BEFORE_BACKWARD = "before-backward"
    """Set to None between forward and backward: the old ones live through the forward pass."""
    IN_PLACE = "in-place"
    """Filled with zeros (``set_to_none=False``, the default before torch 2.0): they live for ever."""

    __str__ = str.__str__


FLOAT_DTYPES = ("float32", "float16", "bfloat16")
AMP_DTYPES = ("float16", "bfloat16")


class InputSpec(NamedTuple):
    """One ``--input``: a tensor's shape without the batch dimension."""

    name: str | None
    """Keyword of ``forward``; ``None`` passes it by position."""
    shape: tuple[int, ...]
    dtype: str | None
    """``None``: the workload's dtype."""


class Vary(NamedTuple):
    """Another axis than the batch, and the values to look at."""

    axis: str
    """``seq`` or ``image``."""
    first: int
    last: int

    @property
    def unit(self) -> int:
        """Images whose sides are no multiples of the model's strides often do not run."""
        return 32 if self.axis == "image" else 1

    def within(self, unit: int) -> Vary:
        """The range from its first to its last multiple of ``unit``.

        Raises:
            UsageError: There is none.

        >>> Vary("image", 100, 200).within(32)
        Vary(axis='image', first=128, last=192)
        """
        first, last = -(-self.first // unit) * unit, self.last // unit * unit
        if unit < 1 or first > last:
            raise UsageError(
                f"no multiple of {unit} lies in {self.axis}={self.first}..{self.last}", where="--vary",
                hint="widen the range, or give another --multiple-of",
            )  # fmt: skip
        return Vary(self.axis, first, last)

    def options(self, value: int) -> dict[str, Any]:
        """The fields of a workload at a value."""
        return {self.axis: value, f"{self.axis}_given": True}


Word = TypeVar("Word", bound=enum.Enum)


def _word(words: type[Word], value: object, option: str) -> Word:
    try:
        return words(value)
    except ValueError as error:
        known = ", ".join(str(word) for word in words)
        raise UsageError(f"{option} {value} is unknown", hint=f"use {known}") from error


def _count(value: object, option: str) -> int:
    """A positive whole number, of Python's or numpy's."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"{option} is {value!r}, it must be a whole number", hint="give an int, such as 8") from None
    if number < 1:
        raise UsageError(f"{option} is {number}, it must be at least 1")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One reference loop, as design part 1 describes it.

    Raises:
        UsageError: A value is out of range.
    """

    mode: Mode = Mode.INFERENCE
    batch: int = 1
    dtype: str = "float32"
    """Of the weights and floating inputs."""
    amp: str | None = None
    """Autocast dtype; fp16 training also uses ``GradScaler``."""
    optimizer: str = "adamw"
    inputs: tuple[InputSpec, ...] = ()
    image: int = 224
    image_given: bool = False
    """Whether the user named the image size, or the target's own default may be used."""
    seq: int = 128
    seq_given: bool = False
    """Likewise for the sequence length."""
    model_args: tuple[tuple[str, object], ...] = ()
    attn: str | None = None
    channels_last: bool = False
    checkpoint: bool = False
    accumulate: int = 1
    clip: bool = False
    zero_grad: ZeroGrad = ZeroGrad.AFTER_STEP
    steps: int | None = None
    """``None``: 3 in training, 2 otherwise (design, part 1)."""
    foreach: bool = True
    conv_workspace: ConvWorkspace = ConvWorkspace.AUTO
    prompt: int | None = None
    """Prompt length in generation; ``None``: ``seq``."""
    new_tokens: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", _word(Mode, self.mode, "--mode"))
        object.__setattr__(self, "zero_grad", _word(ZeroGrad, self.zero_grad, "--zero-grad"))
        for name in ("batch", "image", "seq", "accumulate", "new_tokens", "steps", "prompt"):
            if getattr(self, name) is not None or name not in ("steps", "prompt"):
                object.__setattr__(self, name, _count(getattr(self, name), f"--{name.replace('_', '-')}"))
        for axis, default in (("image", 224), ("seq", 128)):  # from Python: image=64
            given = getattr(self, f"{axis}_given") or getattr(self, axis) != default
            object.__setattr__(self, f"{axis}_given", given)
        if not isinstance(self.optimizer, str):
            hint = "give its name: adamw, sgd-momentum, or package.module:NAME for one of your own"
            raise UsageError(f"--optimizer is {self.optimizer!r}, not a name", hint=hint)
        if self.dtype not in FLOAT_DTYPES:
            raise UsageError(f"--dtype {self.dtype} is unknown", hint="use " + ", ".join(FLOAT_DTYPES))
        if self.amp is not None and self.amp not in AMP_DTYPES:
            raise UsageError(f"--amp {self.amp} is unknown", hint="use " + ", ".join(AMP_DTYPES))
        if self.training and self.amp == "float16" and self.dtype == "float16":
            raise UsageError(
                "--amp float16 with --dtype float16: GradScaler refuses float16 gradients",
                hint="leave out --dtype: mixed precision keeps float32 weights",
            )

    @property
    def step_count(self) -> int:
        """Steps of the reference loop."""
        if self.steps is not None:
            return self.steps
        return 3 if self.mode is Mode.TRAINING else 2

    @property
    def training(self) -> bool:
        """Whether a backward pass runs."""
        return self.mode is Mode.TRAINING
