"""From what the recorder wrote to a :class:`~fxmem.tape.Tape`: the last module with torch types."""

from __future__ import annotations

import bisect
import functools
import math
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from fxmem.recording.ledger import StorageNote, TensorNote
from fxmem.recording.recorder import OpNote, Recorder
from fxmem.tape import ModuleInfo, Op, Phase, Ref, Role, Storage, Tape, TensorMeta


def to_tape(recorder: Recorder, *, batch: int, training: bool, modules: tuple[ModuleInfo, ...]) -> Tape:
    """Settle the roles and drop every torch type.

    Args:
        recorder: After the run.
        batch: Batch size that was run.
        training: Whether a backward pass ran.
        modules: Facts about the model's modules.
    """
    end = recorder.end if recorder.end is not None else len(recorder.events)
    events = tuple(recorder.events[:end])
    roles = _roles(recorder, events)
    metas: dict[TensorNote, TensorMeta] = {}
    ops = tuple(_op(note, metas) for note in recorder.ops if note.start <= end)
    storages = tuple(_storage(note, role, recorder.ops) for note, role in zip(recorder.storages, roles, strict=True))
    return Tape(
        batch=batch, steps=len(recorder.step_starts), storages=storages, ops=ops, events=events,
        step_starts=tuple(recorder.step_starts), modules=modules, training=training,
        torch_version=torch.__version__, notes=tuple(recorder.notes), unmodelled=tuple(recorder.unmodelled),
    )  # fmt: skip


def module_infos(model: nn.Module) -> tuple[ModuleInfo, ...]:
    """Path, class, parameters and their bytes of every module, each tensor counted once."""
    infos = []
    for path, module in model.named_modules():
        params = list(module.parameters())
        infos.append(
            ModuleInfo(
                path=path,
                kind=type(module).__name__,
                parameters=sum(p.numel() for p in params),
                parameter_bytes=sum(p.numel() * p.element_size() for p in params),
            )
        )
    return tuple(infos)


def _storage(note: StorageNote, role: Role, ops: list[OpNote]) -> Storage:
    module = note.module
    if not module and note.op is not None:
        module = ops[note.op].module
    return Storage(
        nbytes=note.nbytes, role=role, shape=note.shape, dtype=_name(note.dtype), op=note.op,
        name=note.name, module=module,
    )  # fmt: skip


def _roles(recorder: Recorder, events: tuple[int, ...]) -> list[Role]:
    """Roles that the run did not name follow from when a storage is born and dies."""
    deaths = {~e: i for i, e in enumerate(events) if e < 0}
    births = {e: i for i, e in enumerate(events) if e >= 0}
    backward_starts = [
        op.start
        for before, op in zip([None, *recorder.ops], recorder.ops, strict=False)
        if op.phase is Phase.BACKWARD and (before is None or before.phase is not Phase.BACKWARD)
    ]
    bounds = [*recorder.step_starts[1:], len(events)]
    roles = []
    for sid, note in enumerate(recorder.storages):
        if note.role is not None or note.op is None or sid not in births:
            roles.append(note.role or Role.TEMPORARY)
            continue
        born, dies = births[sid], deaths.get(sid, len(events))
        step_end = bounds[min(bisect.bisect_right(bounds, born), len(bounds) - 1)]
        phase = recorder.ops[note.op].phase if note.op < len(recorder.ops) else Phase.FORWARD
        roles.append(_role_of_lifetime(phase, born, dies, step_end, backward_starts))
    return roles


def _role_of_lifetime(phase: Phase, born: int, dies: int, step_end: int, backward_starts: list[int]) -> Role:
    if dies >= step_end:
        return Role.OPTIMIZER_STATE if phase is Phase.OPTIMIZER else Role.OUTPUT
    if phase is Phase.FORWARD:
        i = bisect.bisect_right(backward_starts, born)
        if i < len(backward_starts) and dies >= backward_starts[i]:
            return Role.ACTIVATION
    return Role.TEMPORARY


def _op(note: OpNote, metas: dict[TensorNote, TensorMeta]) -> Op:
    return Op(
        name=op_name(note.func),
        step=note.step,
        phase=note.phase,
        module=note.module,
        source=note.source,
        start=note.start,
        stop=note.stop,
        inputs=tuple([_meta(n, metas) for n in note.inputs]),
        outputs=tuple([_meta(n, metas) for n in note.outputs]),
        args=tuple([plain(a) for a in note.args]),
        kwargs=tuple([(k, plain(v)) for k, v in note.kwargs]),
        flops=_flops(note),
        thread="autograd" if note.in_engine else "main",
    )


def _meta(note: TensorNote, metas: dict[TensorNote, TensorMeta]) -> TensorMeta:
    meta = metas.get(note)
    if meta is None:
        meta = metas[note] = TensorMeta(note.storage, note.shape, note.stride, _name(note.dtype), note.offset)
    return meta


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def op_name(func: Any) -> str:
    """``convolution.default``; operators of other libraries keep their namespace."""
    return str(func).removeprefix("aten.")


def plain(value: object) -> object:
    """An argument without torch types: dtypes, layouts, devices and formats become text."""
    if value is None or isinstance(value, (bool, int, float, str, Ref)):
        return value
    if isinstance(value, tuple):
        return tuple([plain(v) for v in value])
    return str(value).removeprefix("torch.")


def _flops(note: OpNote) -> int:
    passes = _RECURRENT.get(op_name(note.func))
    if passes is not None:
        return passes * _recurrent_flops(note)
    formula: Any = flop_registry.get(getattr(note.func, "overloadpacket", None))
    if formula is None:
        return 0

    def shaped(value: object) -> object:
        if isinstance(value, Ref):
            return torch.Size(note.inputs[value.at].shape)
        return [shaped(v) for v in value] if type(value) is tuple else value

    outputs = [torch.Size(n.shape) for n in note.outputs]
    out_shape = outputs[0] if len(outputs) == 1 else tuple(outputs)
    # Shapes go straight to the formula: its wrapper would walk all arguments for tensors.
    raw = getattr(formula, "__wrapped__", None)
    try:
        args, kwargs = [shaped(a) for a in note.args], {k: shaped(v) for k, v in note.kwargs}
        flops = raw(*args, out_shape=out_shape, **kwargs) if raw else formula(*args, out_val=out_shape, **kwargs)
    except (TypeError, ValueError, AssertionError, IndexError):
        return 0  # the formula does not know this overload
    return int(flops)


_RECURRENT = {"_cudnn_rnn.default": 1, "_cudnn_rnn_backward.default": 2}
"""cuDNN's recurrent layers, which torch's counter leaves out, and how many passes of matrix products they are."""


def _recurrent_flops(note: OpNote) -> int:
    """A multiplication and an addition for each weight of a matrix, at each position of the sequences."""
    first, weights = note.args[0], note.args[1]
    if not isinstance(first, Ref) or type(weights) is not tuple:
        return 0
    *positions, _ = note.inputs[first.at].shape
    shapes = [note.inputs[w.at].shape for w in weights if isinstance(w, Ref)]
    return 2 * math.prod(positions) * sum([math.prod(shape) for shape in shapes if len(shape) > 1])
