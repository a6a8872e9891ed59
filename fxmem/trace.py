"""Runs a target on fake tensors and gives its tape and its ``torch.fx`` graph."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

from fxmem.cuda import personality
from fxmem.device import Device
from fxmem.errors import FxmemError, TraceError, UnsupportedOpError
from fxmem.recording.graph import to_graph
from fxmem.recording.ledger import StorageNote
from fxmem.recording.notes import module_infos, to_tape
from fxmem.recording.recorder import OpNote, Recorder
from fxmem.recording.sourceline import innermost
from fxmem.run import run
from fxmem.source import Inputs, Source
from fxmem.steady import extend
from fxmem.tape import Tape
from fxmem.targets import found
from fxmem.workload import Workload

RECORDED_STEPS = 2
"""Steps that are run; later ones repeat the second if it leaves the state that it found."""


@dataclass(frozen=True)
class Trace:
    """One recorded run.

    Attributes:
        tape: The run as plain data, with all steps of the workload.
        recorded: The steps that were run; the others repeat the last of them.
    """

    tape: Tape
    recorded: Tape
    _ops: tuple[OpNote, ...]
    _storages: tuple[StorageNote, ...]

    @cached_property
    def graph(self) -> fx.Graph:
        """The ATen calls of the recorded steps as a ``torch.fx.Graph``, shapes in ``node.meta``."""
        return to_graph(self._ops, self._storages)


def trace(source: Source, workload: Workload, device: Device, fake_mode: FakeTensorMode, batch: int) -> Trace:
    """Run the reference loop at a batch size and record it.

    Args:
        source: The model, as :func:`fxmem.source.load` built it with ``fake_mode``.
        workload: What to run; its own batch size is not looked at.
        device: The GPU to imitate.
        fake_mode: Makes the fake tensors; not active.
        batch: Samples in the inputs.

    Raises:
        TraceError: The run failed; says where in the user's code.
        InputError: The inputs could not be made.
    """
    steps = workload.step_count
    if source.steps is not None:
        return _record(source, workload, device, fake_mode, batch, steps)
    result = _record(source, workload, device, fake_mode, batch, min(steps, RECORDED_STEPS))
    longer = extend(result.tape, steps)
    if longer is None:
        return _record(source, workload, device, fake_mode, batch, steps)
    return replace(result, tape=longer)


def _record(
    source: Source, workload: Workload, device: Device, fake_mode: FakeTensorMode, batch: int, steps: int
) -> Trace:
    recorder = Recorder(fake_mode)
    with source.opened(), _quiet_warnings():
        inputs = [source.inputs(batch)] if source.steps is None else source.steps(batch)
        with _explained(source, recorder, inputs[0]), personality(recorder, device), recorder:
            run(source, inputs, workload, recorder, steps)
        modules = module_infos(source.module)
        del inputs
    tape = to_tape(recorder, batch=batch, training=workload.training, modules=modules)
    missing = (*tape.unmodelled, *source.wrappers)
    if torch.are_deterministic_algorithms_enabled():
        missing = (*missing, _DETERMINISTIC)
    tape = replace(tape, unmodelled=missing, notes=(*tape.notes, *source.notes))
    return Trace(tape, tape, tuple(recorder.ops), tuple(recorder.storages))


_DETERMINISTIC = "torch.use_deterministic_algorithms(): kernels that sort instead of adding up take more memory"


@contextlib.contextmanager
def _quiet_warnings() -> Iterator[None]:
    """Keep torch's warnings, and its log of fake kernels that refuse their arguments, off the user's streams."""
    import warnings

    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def _explained(source: Source, recorder: Recorder, inputs: Inputs) -> Iterator[None]:
    """Turn whatever the user's code raises into one sentence that says where."""
    try:
        yield
    except FxmemError as error:
        error.where = error.where or source.name
        raise
    except UnsupportedOperatorException as error:
        raise UnsupportedOpError(
            f"operator {error.func} has no fake kernel, so its result's shape is unknown",
            where=_where(error, recorder, source),
            hint="register one with torch.library.register_fake, or replace the operator",
        ) from error
    except Exception as error:
        text = str(error).strip().split("\n")[0].split(" and mode <")[0]
        raise TraceError(
            f"the model's run raised {type(error).__name__}" + (f": {text}" if text else ""),
            where=_where(error, recorder, source),
            hint=_hint(error, inputs, source),
        ) from error


def _where(error: BaseException, recorder: Recorder, source: Source) -> str:
    line = innermost(error.__traceback__)
    module = recorder.failed_in
    place = line or source.name
    return f"{place} (module {module})" if module else place


def _hint(error: BaseException, inputs: Inputs, source: Source) -> str:
    text = str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if "HigherOrderOperator" in text or any(frame.filename.endswith("flex_attention.py") for frame in frames):
        return _COMPILED
    if "no fake impl" in text or "Meta" in text or "not implemented for" in text.lower():
        return "register a fake kernel with torch.library.register_fake, or replace the operator"
    for part, hint in _HINTS.items():
        if part in text:
            return hint
    if isinstance(error, RecursionError):
        return f"the model is nested deeper than Python's recursion limit: call sys.setrecursionlimit in {source.file}"
    if isinstance(error, TypeError) and "argument" in text:
        made = f"inputs(batch) in {source.file}: {found.ARE_ARGUMENTS}"
        return f"the inputs are {_shapes(inputs)}; name them by --input NAME=SHAPE, or by {made}"
    return f"the inputs are {_shapes(inputs)}; change them by --input or inputs(batch), or see --debug"


_COMPILED = (
    "operators that are compiled (flex_attention, cond, scan) cannot be recorded: use scaled_dot_product_attention, or "
    "plain Python"
)

_HINTS = {
    "more than 1 value per channel": "batch norm needs two samples in training: try --batch 2",
    "does not require grad": "nothing that the loss depends on is trained: look for frozen parameters,"
    " inference_mode, detach() or a reentrant checkpoint, or use --mode inference",
    "driver": "the code calls CUDA itself: guard that, or make it a custom operator with torch.library",
    "libcuda": "the code calls CUDA itself: guard that, or make it a custom operator with torch.library",
    "does not support sparse gradients": "use --optimizer sgd, or dense gradients",
    "SparseTensorImpl": "sparse tensors cannot be recorded: use dense ones",
    "shape_env must not be None": "nested tensors cannot be recorded: use padded ones",
    "Trying to backward through": "register its derivative with torch.library.register_autograd",
}
"""Parts of PyTorch's messages, and what helps."""


def _shapes(inputs: Inputs) -> str:
    def shape(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        return type(value).__name__

    parts = [shape(a) for a in inputs.args] + [f"{k}={shape(v)}" for k, v in inputs.kwargs.items()]
    return ", ".join(parts) or "none"
