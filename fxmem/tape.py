"""The program as data: what is allocated, used and freed, in which order. No torch.

A :class:`Tape` is what a traced run leaves behind and all that later stages see. Time is
the index into :attr:`Tape.events`; every interval in fxmem is half-open, ``None`` means
"until the end". An event is one ``int``: ``s >= 0`` means storage ``s`` is allocated,
``~s`` (negative) means it is freed, so a tape of 100,000 events stays small and fast.
Host tensors are not on the tape: a storage is device memory.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Phase(str, enum.Enum):
    """The part of a step that an operator belongs to."""

    SETUP = "setup"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"

    __str__ = str.__str__


class Role(str, enum.Enum):
    """What a storage is for. The values are the names used in the breakdown."""

    PARAMETER = "parameters"
    BUFFER = "buffers"
    INPUT = "inputs"
    GRADIENT = "gradients"
    """A parameter's ``.grad``."""
    OPTIMIZER_STATE = "optimizer_state"
    ACTIVATION = "activations"
    """Made in the forward pass and kept for the backward pass (a saved tensor)."""
    OUTPUT = "outputs"
    """Still bound when its step ends: the model's output and the loss."""
    TEMPORARY = "temporaries"
    WORKSPACE = "workspaces"
    """Taken by a library (cuBLAS, cuDNN) beside the tensors."""

    __str__ = str.__str__


class TensorMeta(NamedTuple):
    """One view of a storage, as an operator saw it. Sizes and strides in elements."""

    storage: int
    """Index into ``Tape.storages``; -1 for a host tensor."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    """torch's name without the prefix: ``float32``, ``bfloat16``, ``int64``."""
    offset: int = 0


class Ref(NamedTuple):
    """A tensor's place in :attr:`Op.args`: the index into ``Op.inputs``."""

    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A piece of device memory, from one allocation to its free."""

    nbytes: int
    """Requested bytes, before the allocator rounds."""
    role: Role
    shape: tuple[int, ...]
    """Shape of the tensor that it was allocated for."""
    dtype: str
    op: int | None
    """Index of the operator that allocated it; ``None`` in the setup."""
    name: str = ""
    """The parameter's, buffer's or input's name, else empty."""
    module: str = ""
    """Path of the module that owns or made it (``layer1.0.conv1``), empty at the top."""
    stream: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator call: an ATen operator, or a step of the setup (``to_device``)."""

    name: str
    """Full overload name without namespace: ``convolution.default``."""
    step: int
    """0 for the setup, then 1, 2, ..."""
    phase: Phase
    module: str
    source: str
    """The user's line, ``path/model.py:12``; empty if none was on the stack."""
    start: int
    """First event index of this operator; the operator's events are [start, stop)."""
    stop: int
    inputs: tuple[TensorMeta, ...] = ()
    outputs: tuple[TensorMeta, ...] = ()
    args: tuple[object, ...] = ()
    """The call's arguments as plain data, tensors replaced by :class:`Ref`."""
    kwargs: tuple[tuple[str, object], ...] = ()
    flops: int = 0
    thread: str = "main"
    """``main``, or ``autograd`` for what the engine's device thread runs on CUDA."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleInfo:
    """A module of the traced model."""

    path: str
    kind: str
    """The class name."""
    parameters: int
    """Elements of its own parameters and of those below it, each tensor once."""
    parameter_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The part of a tape that an allocator sees."""

    events: tuple[int, ...]
    step_starts: tuple[int, ...]
    requests: tuple[tuple[int, int], ...]
    """Bytes and stream of each storage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """One traced run: set-up (model and inputs moved to the device), then the steps.

    Events that fall between two operators (a tensor dies because Python rebinds a name)
    belong to no operator: they lie in [ops[i].stop, ops[i + 1].start).
    """

    batch: int
    steps: int
    storages: tuple[Storage, ...]
    ops: tuple[Op, ...]
    events: tuple[int, ...]
    step_starts: tuple[int, ...]
    """Event index at which step 1, 2, ... begins; the setup lies before the first."""
    modules: tuple[ModuleInfo, ...] = ()
    training: bool = False
    torch_version: str = ""
    notes: tuple[str, ...] = ()
    """What the trace had to assume, one sentence each (reported as coverage notes)."""
    unmodelled: tuple[str, ...] = ()
    """What it could not model: named, never counted as zero in silence."""

    @property
    def demand(self) -> Demand:
        """What the run asks of the allocator."""
        requests = tuple([(storage.nbytes, storage.stream) for storage in self.storages])
        return Demand(events=self.events, step_starts=self.step_starts, requests=requests)
