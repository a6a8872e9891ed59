"""The answer: peak memory, what it is made of, where it is, and what it leaves out.

The bytes are those of the reference run (docs, "What the number means"): model moved to the
device, then the steps, on one GPU, eager. *Not* included: memory of other processes on the
device, allocations that bypass PyTorch's caching allocator (NCCL, custom CUDA code), and all
that ``coverage.unmodelled`` names. What is not known is ``None``, never zero.

The dataclasses mirror the JSON object of ``fxmem estimate --format json`` key by key.
"""

from __future__ import annotations

import enum
import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, fields, is_dataclass

from fxmem.allocator import Plan, StepPeak
from fxmem.coverage import Coverage, cover
from fxmem.device import Device
from fxmem.law import BatchLaw, Piece, counted
from fxmem.liveness import ACTIVATION_ROLES, ModuleRow, last_use_peak, lifetimes, live_at, module_table, peak
from fxmem.tape import Op, Phase, Role, Tape
from fxmem.units import format_size
from fxmem.workload import Workload

SCHEMA = 1
_LARGEST = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """The device, as far as the answer depends on it."""

    name: str
    arch: str
    capacity_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBytes:
    """Peaks over the whole run; each may fall on its own moment."""

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int | None
    """Reserved bytes and the CUDA context; ``None`` where the context is unknown."""
    requested_bytes: int
    """What tensors and kept workspaces ask for, before the allocator rounds; kernels' scratch left out."""
    last_use_bytes: int
    """The same if each tensor died after its last use: what a static runtime could reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Bytes at the allocated peak, in whole allocator blocks; then what lies beside them."""

    parameters: int = 0
    buffers: int = 0
    inputs: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    activations: int = 0
    outputs: int = 0
    temporaries: int = 0
    workspaces: int = 0
    cached: int = 0
    """Peak reserved bytes beyond the peak allocated bytes."""
    context: int | None = None

    @property
    def allocated_bytes(self) -> int:
        """The sum of the nine parts that are allocated."""
        return sum(getattr(self, role.value) for role in Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Saved, output and temporary tensors: what grows with the data."""

    peak_bytes: int
    """Their own peak, requested bytes."""
    per_sample_bytes: int | None
    """How fast it grows with the batch; ``None`` without a batch law."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The peak of the requested bytes as a function of the batch."""

    exact: bool
    pieces: tuple[Piece, ...]
    why: str = ""
    """Why it is not exact, or why small batches stand alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTensor:
    """A tensor that is live at the peak."""

    bytes: int
    """Requested bytes."""
    role: Role
    shape: tuple[int, ...]
    dtype: str
    module: str
    op: str | None
    """The operator that made it; ``None`` for the setup."""
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakAt:
    """Where the allocated peak is."""

    step: int
    """0 while the model is moved to the device."""
    phase: Phase
    module: str
    op: str | None
    source: str
    tensors: tuple[PeakTensor, ...]
    """The largest ones then, largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxBatch:
    """The largest batch that fits the device."""

    batch: int | None
    safety: float
    """Share of the memory that may be used."""
    reserved_for_others_bytes: int
    proved: bool = True
    """Whether the next batch is known not to fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The model itself."""

    parameters: int
    """Elements, each tensor once."""
    parameter_bytes: int
    flops: int
    """Of one forward pass of one micro-batch (in step 1; of all tokens in generation), at the estimate's batch."""
    step_flops: int
    """Of all phases of that step, with all its micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The whole answer for one target and workload.

    Raises:
        ValueError: The parts do not sum up to the peaks.
    """

    target: str
    mode: str
    batch: int
    dtype: str
    amp: str | None
    optimizer: str | None
    """``None`` unless the workload trains."""
    torch: str
    device: DeviceLimits
    peak: PeakBytes
    steps: tuple[StepPeak, ...]
    breakdown: Breakdown
    activations: Activations
    scaling: Scaling
    peak_at: PeakAt | None
    """``None`` where nothing is allocated."""
    max_batch: MaxBatch | None = None
    fits: bool | None = None
    """Whether the device holds it; ``None`` without a limit."""
    model: ModelSize
    modules: tuple[ModuleRow, ...] = ()
    coverage: Coverage
    seconds: float

    def __post_init__(self) -> None:
        parts, top = self.breakdown, self.peak
        if parts.allocated_bytes != top.allocated_bytes:
            raise ValueError(f"the parts sum to {parts.allocated_bytes} bytes, allocated are {top.allocated_bytes}")
        if parts.allocated_bytes + parts.cached != top.reserved_bytes:
            raise ValueError(f"with {parts.cached} bytes cached the parts miss the {top.reserved_bytes} reserved")
        device_bytes = None if parts.context is None else top.reserved_bytes + parts.context
        if device_bytes != top.device_bytes:
            raise ValueError(f"with the context the parts sum to {device_bytes} bytes, not to {top.device_bytes}")

    def __str__(self) -> str:
        top = self.peak
        sizes = f"allocated {format_size(top.allocated_bytes)}, reserved {format_size(top.reserved_bytes)}"
        verdict = "" if self.fits is None else f", {'fits' if self.fits else 'does not fit'} {self.device.name}"
        missing = ["the CUDA context (unknown)"] if top.device_bytes is None else []
        missing += ["what is not modelled"] if self.coverage.lower_bound else []
        condition = f" if {' and '.join(missing)} {'do' if len(missing) > 1 else 'does'} too" if missing else ""
        return f"{self.target}, {self.mode}, batch {self.batch}: {sizes}{verdict}{condition if self.fits else ''}"

    def to_dict(self) -> dict[str, object]:
        """Give the JSON object of ``fxmem estimate --format json`` (design, part 3)."""
        return {"schema": SCHEMA, **mapping(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What was asked."""

    target: str
    workload: Workload
    device: Device


def assemble(question: Question, tape: Tape, plan: Plan, law: BatchLaw | None = None, seconds: float = 0.0) -> Estimate:
    """Put the answer together.

    Args:
        question: Target, workload and device.
        tape: The run at the workload's batch, with workspaces.
        plan: Of the same tape, replayed.
        law: Of the same program; ``None`` where only this batch was traced.
        seconds: Time that the estimate took.

    Returns:
        The estimate; ``max_batch`` is left open (``dataclasses.replace`` sets it).

    Raises:
        ValueError: Tape, plan and workload do not belong together.
    """
    workload, device = question.workload, question.device
    if tape.batch != workload.batch or len(plan.block_bytes) != len(tape.storages):
        raise ValueError(f"a tape of batch {tape.batch} and its plan do not answer for batch {workload.batch}")
    moment = -1 if plan.peak_event is None else plan.peak_event
    peaks = _peaks(tape, plan, device)
    scaling, law_notes = _scaling(law, tape.batch, peaks.requested_bytes)
    return Estimate(
        target=question.target,
        mode=workload.mode.value,
        batch=workload.batch,
        dtype=workload.dtype,
        amp=workload.amp,
        optimizer=workload.optimizer if workload.training else None,
        torch=tape.torch_version,
        device=DeviceLimits(name=device.name, arch=device.arch, capacity_bytes=device.capacity_bytes),
        peak=peaks,
        steps=plan.steps,
        breakdown=breakdown(tape, plan, device.context_bytes),
        activations=_activations(tape, law),
        scaling=scaling,
        peak_at=None if plan.peak_event is None else place(tape, plan.peak_event),
        fits=_fits(peaks, plan, device),
        model=_model(tape, workload.accumulate if workload.training else 1),
        modules=module_table(tape, sizes=plan.block_bytes, event=moment),
        coverage=_coverage(tape, plan, device, law_notes),
        seconds=seconds,
    )


def _peaks(tape: Tape, plan: Plan, device: Device) -> PeakBytes:
    requested = counted(tape)
    reserved = plan.peak_reserved_bytes
    return PeakBytes(
        allocated_bytes=plan.peak_allocated_bytes,
        reserved_bytes=reserved,
        device_bytes=None if device.context_bytes is None else reserved + device.context_bytes,
        requested_bytes=peak(tape, requested).nbytes,
        last_use_bytes=last_use_peak(tape, requested, lifetimes(tape)).nbytes,
    )


def breakdown(tape: Tape, plan: Plan, context_bytes: int | None) -> Breakdown:
    """Sum up what is live at the allocated peak by role, and what lies beside it."""
    parts = Counter[str]()
    for index in live_at(tape, -1 if plan.peak_event is None else plan.peak_event):
        parts[tape.storages[index].role.value] += plan.block_bytes[index]
    cached = plan.peak_reserved_bytes - plan.peak_allocated_bytes
    return Breakdown(**parts, cached=cached, context=context_bytes)


def _activations(tape: Tape, law: BatchLaw | None) -> Activations:
    top = peak(tape, [storage.nbytes for storage in tape.storages], ACTIVATION_ROLES)
    slope = None if law is None else law.activation_slope(tape.batch)
    return Activations(peak_bytes=top.nbytes, per_sample_bytes=slope)


def _scaling(law: BatchLaw | None, batch: int, requested: int) -> tuple[Scaling, tuple[str, ...]]:
    """Take over the law, with this batch as a point of its own if the law does not cover it."""
    point = Piece(from_batch=batch, to_batch=batch, fixed_bytes=requested, per_sample_bytes=0)
    if law is None:
        return Scaling(exact=False, pieces=(point,), why="traced at this batch only"), ()
    pieces, notes = law.pieces(), []
    if not law.exact:
        notes.append(f"the batch law is not proved: {law.why}")
    elif law.lone:
        alone = ", ".join(str(tape.batch) for tape in law.lone)
        notes.append(f"the batch law leaves out batch {alone}: {law.why}")
    here = next((piece for piece in pieces if piece.covers(batch)), None)
    if here is None:
        pieces = tuple(sorted((*pieces, point), key=lambda piece: piece.from_batch))
    elif here.at(batch) != requested:
        notes.append(
            f"the batch law says {format_size(here.at(batch))} at this batch, {format_size(requested)} were requested:"
            " kernels take temporaries that are on no line"
        )
    return Scaling(exact=law.exact, pieces=pieces, why=law.why), tuple(notes)


def place(tape: Tape, event: int) -> PeakAt:
    """Name the operator during which an allocation falls (none between operators), and what is live then."""
    step = bisect_right(tape.step_starts, event)
    at = bisect_right([op.stop for op in tape.ops], event)
    running = tape.ops[at] if at < len(tape.ops) and tape.ops[at].start <= event else None
    before = tape.ops[at - 1] if at else None
    made = tape.storages[tape.events[event]]
    return PeakAt(
        step=step,
        phase=running.phase if running else _phase_between(before, step),
        module=running.module if running else made.module,
        op=running.name if running else None,
        source=running.source if running else "",
        tensors=_largest(tape, event),
    )


def _phase_between(before: Op | None, step: int) -> Phase:
    if step == 0:
        return Phase.SETUP
    return before.phase if before is not None and before.step == step else Phase.FORWARD


def _largest(tape: Tape, event: int) -> tuple[PeakTensor, ...]:
    live = sorted(live_at(tape, event), key=lambda index: (-tape.storages[index].nbytes, index))
    return tuple(
        PeakTensor(
            bytes=storage.nbytes,
            role=storage.role,
            shape=storage.shape,
            dtype=storage.dtype,
            module=storage.module,
            op=None if storage.op is None else tape.ops[storage.op].name,
            name=storage.name,
        )
        for storage in (tape.storages[index] for index in live[:_LARGEST])
    )


def _fits(peaks: PeakBytes, plan: Plan, device: Device) -> bool | None:
    if device.capacity_bytes is None:
        return None
    needed = peaks.reserved_bytes if peaks.device_bytes is None else peaks.device_bytes
    return plan.oom is None and needed <= device.capacity_bytes


def _model(tape: Tape, micro_batches: int) -> ModelSize:
    root = next((info for info in tape.modules if info.path == ""), None)
    own = [storage for storage in tape.storages if storage.role is Role.PARAMETER]
    first = [op for op in tape.ops if op.step == 1]
    return ModelSize(
        parameters=root.parameters if root else sum(math.prod(storage.shape) for storage in own),
        parameter_bytes=root.parameter_bytes if root else sum(storage.nbytes for storage in own),
        flops=sum(op.flops for op in first if op.phase is Phase.FORWARD) // micro_batches,
        step_flops=sum(op.flops for op in first),
    )


def _coverage(tape: Tape, plan: Plan, device: Device, law_notes: tuple[str, ...]) -> Coverage:
    notes = [*tape.notes, *law_notes]
    if plan.oom is not None:
        notes.append(
            f"out of memory: a request of {format_size(plan.oom.requested_bytes)} failed with"
            f" {format_size(plan.oom.allocated_bytes)} allocated and {format_size(plan.oom.reserved_bytes)} reserved;"
            " the peaks are those without a limit"
        )
    return cover([device], tape.unmodelled, notes)


def mapping(value: object) -> dict[str, object]:
    """Turn a dataclass into plain JSON values, in the order of its fields."""
    return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}  # type: ignore[arg-type]


def _plain(value: object) -> object:
    if is_dataclass(value):
        return mapping(value)
    if isinstance(value, StepPeak):
        return value._asdict()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, enum.Enum) else value
