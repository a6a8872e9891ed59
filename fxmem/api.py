"""The composition root: the only module that knows every stage, from target to estimate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from fxmem.allocator import Plan, replay
from fxmem.allocator_config import AllocatorConfig
from fxmem.batch import Limits, largest, leaving, not_searched, with_max_batch
from fxmem.batch_report import BatchReport, DeviceBatch, report_batches
from fxmem.cudnn import workspaces
from fxmem.curve import sample
from fxmem.device import Device, as_device
from fxmem.errors import InputError, TraceError, UsageError
from fxmem.estimate import Estimate, Question, assemble
from fxmem.kernels import Target, expand, tape_questions
from fxmem.law import BatchLaw, fit, with_kernels
from fxmem.program import MAX_TRACES, Program, Tapes, VariedTapes
from fxmem.source import Source, load
from fxmem.tape import Tape
from fxmem.trace import Trace
from fxmem.trace import trace as record
from fxmem.workload import ConvWorkspace, Vary, Workload

__all__ = ["estimate", "max_batch", "trace"]

_FAR = 11
"""Distance of the trace that proves the law: one next to the others would miss a size such as ``batch // 4``."""

AnyTarget = str | nn.Module | Callable[..., object]


class _Run:
    """A loaded target and the traces made of it, within one call of the API."""

    def __init__(self, target: AnyTarget, workload: Workload, device: Device, **given: Any) -> None:
        self.workload = workload
        self.device = device
        self.given = given
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.source: Source = load(target, workload, self.fake_mode, **given)
        self.target = _target(device)
        if workload.conv_workspace is ConvWorkspace.AUTO:
            ask = workspaces(device.arch, device.sm_count, device.capacity_bytes)
            self.target = replace(self.target, workspaces=ask)

    def at(self, batch: int) -> Trace:
        return record(self.source, self.workload, self.device, self.fake_mode, batch)

    def tapes(self, law: BatchLaw, limit: int = MAX_TRACES) -> Tapes:
        """The tapes at all batches; up to ``limit`` that the law does not cover are traced when they are asked for."""
        start = self.workload.batch
        return Tapes(law, self.workload.step_count, self.target, self.all_steps, limit, start=start)

    def recorded(self, batches: Sequence[int]) -> list[Tape]:
        """The steps that were run at each batch at which the model runs."""
        return [traced.recorded for batch in batches if (traced := self._attempt(batch)) is not None]

    def all_steps(self, batch: int) -> Tape:
        """The whole run."""
        return self.at(batch).tape

    def _attempt(self, batch: int) -> Trace | None:
        try:
            return self.at(batch)
        except (TraceError, InputError):
            return None


def estimate(
    target: AnyTarget,
    inputs: Any = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    workload: Workload | None = None,
    device: Device | str | None = None,
    alloc_conf: str | None = None,
    law: bool = True,
    safety: float = 0.9,
    reserve_bytes: int = 0,
    **options: Any,
) -> Estimate:
    """Predict the GPU memory of a workload.

    Args:
        target: A target's text (``model.py``, ``torchvision:resnet50``, ...), an ``nn.Module``, or a callable
            that makes one. A module is given back as it was.
        inputs: Called with the batch size, gives the model's inputs; or the inputs themselves, whose batch
            size then is the workload's and of which no batch law can be found.
        loss: Called with the output in training.
        workload: What to run; ``options`` are its fields by name and override it.
        device: A :class:`~fxmem.device.Device` or what ``--device`` takes; the H200's rules without a limit
            by default.
        alloc_conf: The text of ``PYTORCH_ALLOC_CONF``.
        law: Whether to find the batch law (traces at two more batch sizes), and with it the largest batch.
        safety: Share of the device's memory that the largest batch may use.
        reserve_bytes: Memory of the device that others hold; ``fits`` and the largest batch leave it to them.
        **options: Fields of the workload.

    Raises:
        FxmemError: Whatever the user can mend.

    >>> e = estimate(nn.Linear(8, 4), lambda batch: torch.zeros(batch, 8), batch=2)
    >>> e.breakdown.parameters
    1024
    """
    began = time.perf_counter()
    workload = _workload(workload, options)
    gpu = as_device(device)
    config = AllocatorConfig.parse(alloc_conf or "")
    maker, workload = _maker(inputs, workload)
    run = _Run(target, workload, gpu, inputs=maker, loss=loss)
    traced = run.at(workload.batch)
    found = _law(run, traced.recorded, _others(workload.batch))[0] if law and (maker is inputs) else None
    expanded = expand(traced.tape, run.target)
    if found is not None and _unmoved(found, workload.batch):
        expanded = replace(expanded, notes=(*expanded.notes, _UNMOVED))
    question = Question(target=_name(target, run.source), workload=workload, device=gpu)
    answer = leaving(assemble(question, expanded, _plan(expanded, config, gpu), found), reserve_bytes)
    if found is not None and gpu.capacity_bytes is not None:
        limits = _limits(gpu, safety, reserve_bytes)
        # `max_batch` traces as often as it takes.
        best = largest(run.tapes(found, limit=1), config, limits) if found.exact else not_searched(limits)
        answer = with_max_batch(answer, best)
    return replace(answer, seconds=time.perf_counter() - began)


def max_batch(
    target: AnyTarget,
    inputs: Callable[[int], Any] | None = None,
    *,
    device: Device | str | Sequence[Device | str],
    loss: Callable[[Any], torch.Tensor] | None = None,
    workload: Workload | None = None,
    alloc_conf: str | None = None,
    safety: float = 0.9,
    reserve_bytes: int = 0,
    processes: int = 1,
    multiple_of: int | None = None,
    vary: Vary | None = None,
    curve: bool = False,
    **options: Any,
) -> BatchReport:
    """Find the largest batch that fits a device, or each of several; or the longest sequence or largest image.

    Args:
        target: As for :func:`estimate`.
        inputs: Called with the batch size, gives the model's inputs.
        device: One or more, each with a limit.
        loss: Called with the output in training.
        workload: What to run. A device holds it if its largest batch is not below the workload's.
        alloc_conf: The text of ``PYTORCH_ALLOC_CONF``.
        safety: Share of the device's memory that may be used.
        reserve_bytes: Left to the system and to others besides.
        processes: Replicas on one device.
        multiple_of: Look at multiples of this only; ``None``: 32 for images, else 1.
        vary: Look for the largest of these instead, at the workload's batch. Needs a target that makes its
            inputs by the workload.
        curve: Whether to replay batches up to the answer too, for a plot: of the first device, as far as the
            largest of the answers.
        **options: Fields of the workload.

    Raises:
        FxmemError: Whatever the user can mend.

    >>> max_batch(nn.Linear(8, 4), lambda batch: torch.zeros(batch, 8), device="64MiB", safety=1).batch
    327680
    """
    began = time.perf_counter()
    workload = _workload(workload, options)
    config = AllocatorConfig.parse(alloc_conf or "")
    if not (vary is None or isinstance(vary, Vary)):
        raise UsageError(f"vary is {vary!r}", where="vary", hint='give fxmem.Vary("image", 64, 2048), or of "seq"')
    gpus = _devices(device)
    limits = [_limits(gpu, safety, reserve_bytes, processes) for gpu in gpus]
    unit = multiple_of or (1 if vary is None else vary.unit)
    vary = None if vary is None else vary.within(unit)
    programs: dict[tuple[str, int], tuple[Program, Tape]] = {}
    found: list[DeviceBatch] = []
    for gpu, limit in zip(gpus, limits, strict=True):
        if (gpu.arch, gpu.sm_count) not in programs:
            run = _Run(target, workload, gpu, inputs=inputs, loss=loss)
            programs[gpu.arch, gpu.sm_count] = _along_batch(run) if vary is None else _along(vary, run, target)
        program, first = programs[gpu.arch, gpu.sm_count]
        answer = largest(program, config, limit, unit)
        tape = _noted(program, answer.batch, first)
        found.append(DeviceBatch(device=gpu, answer=answer, tape=tape, law=getattr(program, "law", None)))
    if curve:
        program, farthest = programs[gpus[0].arch, gpus[0].sm_count][0], max(entry.answer.batch for entry in found)
        found[0] = replace(found[0], curve=sample(program, config, farthest, gpus[0].context_bytes))
    question = Question(target=_name(target, run.source), workload=workload, device=gpus[0])
    return report_batches(question, found, time.perf_counter() - began)


def trace(
    target: AnyTarget,
    inputs: Any = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    workload: Workload | None = None,
    device: Device | str | None = None,
    **options: Any,
) -> Trace:
    """Record a workload and hand out its tape, with what kernels take, and its ``torch.fx`` graph.

    Args: as :func:`estimate`.

    >>> t = trace(nn.Linear(8, 4), lambda batch: torch.zeros(batch, 8), steps=1)
    >>> [op.name for op in t.tape.ops]
    ['t.default', 'addmm.default']
    """
    workload = _workload(workload, options)
    gpu = as_device(device)
    maker, workload = _maker(inputs, workload)
    run = _Run(target, workload, gpu, inputs=maker, loss=loss)
    traced = run.at(workload.batch)
    return replace(traced, tape=expand(traced.tape, run.target))


def _workload(workload: Workload | None, options: dict[str, Any]) -> Workload:
    known = {f.name for f in fields(Workload)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise UsageError(f"unknown option {unknown[0]}", hint="options are " + ", ".join(sorted(known)))
    named: dict[str, Any] = {f"{axis}_given": True for axis in ("image", "seq") if axis in options}
    return replace(workload or Workload(), **{**named, **options})


def _devices(given: Device | str | Sequence[Device | str]) -> list[Device]:
    gpus = [as_device(gpu) for gpu in ([given] if isinstance(given, str) or not isinstance(given, Sequence) else given)]
    if not gpus:
        raise UsageError("no device is given", where="device", hint="name a GPU or a size such as 24GiB")
    return gpus


def _maker(inputs: Any, workload: Workload) -> tuple[Callable[[int], Any] | None, Workload]:
    """What makes the inputs; ready ones have a batch of their own, which the workload must not contradict."""
    if inputs is None or callable(inputs):
        return inputs, workload
    sizes = {len(t) for t in pytree.tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.dim()}
    if len(sizes) == 1 and workload.batch == 1:
        workload = replace(workload, batch=sizes.pop())
    elif sizes and workload.batch not in sizes:
        raise UsageError(
            f"batch is {workload.batch}, the inputs are for {', '.join(map(str, sorted(sizes)))}",
            where="inputs",
            hint="give a function of the batch, as lambda batch: torch.zeros(batch, 8), or leave batch out",
        )
    return (lambda _: inputs), workload


def _target(device: Device) -> Target:
    version = torch.__version__.split("+")[0].split(".")
    return Target(
        sm=int(device.arch.removeprefix("sm_").rstrip("af")), sm_count=device.sm_count,
        torch_version=(int(version[0]), int(version[1])),
    )  # fmt: skip


def _limits(device: Device, safety: float, reserve_bytes: int, processes: int = 1) -> Limits:
    if device.capacity_bytes is None:
        raise UsageError("the largest batch needs a limit", where="--device", hint="name a GPU or a size such as 24GiB")
    return Limits(
        capacity_bytes=device.capacity_bytes, context_bytes=device.context_bytes, safety=safety,
        reserve_bytes=reserve_bytes, processes=processes,
    )  # fmt: skip


def _plan(tape: Tape, config: AllocatorConfig, device: Device) -> Plan:
    """The replay on the device. Where that runs out of memory: the figures that it would need, and the failure."""
    if device.capacity_bytes is None:
        return replay(tape, config)
    limited = replay(tape, config, device.capacity_bytes - (device.context_bytes or 0))
    return limited if limited.oom is None else replace(replay(tape, config), oom=limited.oom)


def _name(target: AnyTarget, source: Source) -> str:
    return target if isinstance(target, str) else source.name


def _noted(program: Program, batch: int, first: Tape) -> Tape:
    """A tape with the notes of a batch: its own where it was traced; the law's tapes have those of the first."""
    own = program.at(batch) if batch in (*program.known, *program.traced) else None
    return own or first


def _along_batch(run: _Run) -> tuple[Program, Tape]:
    """The program at any batch, and a tape of it with what kernels take."""
    # Batch 1 is often a program of its own, so it is traced only if the answer may be so small.
    first = next(iter(run.recorded([2])), None) or run.at(run.workload.batch).recorded
    law, expanded = _law(run, first, (first.batch + 1, first.batch + _FAR))
    if _unmoved(law, first.batch):
        raise UsageError(
            _UNMOVED, where=run.source.name, hint="let inputs(batch) make as many samples as it is asked for"
        )
    return run.tapes(law), expanded


def _along(vary: Vary, run: _Run, target: AnyTarget) -> tuple[Program, Tape]:
    """The program at any length or size, each of which is traced; and the tape of the first with what kernels take."""
    batch, seen = run.workload.batch, dict[int, Tape]()

    def trace_at(value: int) -> Tape:
        changed = _Run(target, replace(run.workload, **vary.options(value)), run.device, **run.given)
        tape = changed.all_steps(batch)
        if any(tape.storages == other.storages for other in seen.values()):
            raise UsageError(
                f"{vary.axis} changes nothing here", where="--vary", hint=f"inputs(batch, {vary.axis}) may take it"
            )
        seen[value] = tape
        return tape

    program = VariedTapes(vary.axis, (vary.first, vary.last), run.target, trace_at)
    first = program.at(vary.first)
    if first is None:
        raise program.failed[vary.first]
    return program, first


_UNMOVED = "nothing depends on the batch: the inputs are the same for every one"


def _unmoved(law: BatchLaw, batch: int) -> bool:
    """Whether all sizes are the same at a batch and at one far from it."""
    return law.exact and law.sizes(batch) == law.sizes(batch + _FAR)


def _others(batch: int) -> tuple[int, int]:
    """The batches that make the law with the one asked for: a small one, and a far one unless it is that itself."""
    far = 2 + _FAR
    return (1, 2) if batch >= far else (2 if batch == 1 else 1, far)


def _law(run: _Run, tape: Tape, batches: tuple[int, int]) -> tuple[BatchLaw, Tape]:
    """Fit the law to tapes at this batch and two others; once more where batch 1 stands alone.

    Returns:
        The law, and the tape with what kernels take.
    """
    tapes = [tape, *run.recorded(batches)]
    law = fit(tapes)
    if law.needs_proof or len(tapes) <= len(batches):
        used = {t.batch for t in tapes}
        tapes += run.recorded([next(b for b in (2, 3, 4, 5) if b not in used)])
        law = fit(tapes)
    if run.target.workspaces is not None:
        run.target.workspaces.prepare(tape_questions(tapes, run.target))
    expanded = [expand(t, run.target) for t in tapes]
    return with_kernels(law, expanded), expanded[0]
