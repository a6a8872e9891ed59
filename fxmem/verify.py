"""The tracer's self-check: the model runs for real on the CPU, and its tape must say the same.

The tape is made as for CUDA, but without what makes a run look like CUDA, so it stands for a run on the CPU.
The real run's allocations come from torch's profiler. What a kernel takes and gives back within one operator
is not on a tape, nor are single numbers; both are left out, and counted.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn
from torch._C._profiler import _EventType
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from fxmem.compare import Comparison, Group, compare
from fxmem.errors import FxmemError, TraceError, UsageError
from fxmem.estimate import mapping
from fxmem.recording.notes import to_tape
from fxmem.recording.recorder import Recorder
from fxmem.run import loop, run
from fxmem.snapshot import Recorded, Recording
from fxmem.source import Inputs, load, load_real
from fxmem.tape import Phase, Tape
from fxmem.workload import Workload

__all__ = ["Verification", "verify"]

_NUMBER = 16
"""Bytes up to which an allocation is a number: the CPU keeps many that CUDA does not."""
_MOST = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The real run beside the tape."""

    target: str
    same: bool
    """Whether every allocation of the tape was made, in order, and freed at its moment, and none is known to lack."""
    compared: int
    predicted: int
    inside_kernels: int
    """Allocations of the real run that live within one operator, or that no operator of the tape makes."""
    numbers: int
    missing: tuple[Group, ...]
    """On the tape and not in the run."""
    longer: tuple[Group, ...]
    shorter: tuple[Group, ...]
    unmodelled: tuple[str, ...] = ()
    """What the tape says itself that it leaves out (rows that values select): it was part of the real run."""

    def to_dict(self) -> dict[str, object]:
        """The JSON object of ``fxmem verify --format json``."""
        return {"schema": 1, **mapping(self)}


class _Alloc(NamedTuple):
    time: int
    address: int
    nbytes: int
    """Negative for a free."""
    op: str
    within: int
    """When the operator ends in which it happens; 0 outside of any that is on the tape."""


def verify(target: str, workload: Workload) -> Verification:
    """Run a target on the CPU, fake and real, and compare.

    Args:
        target: The target's text.
        workload: What to run, at a size that the CPU manages.

    Raises:
        UsageError: The workload needs CUDA.
        FxmemError: The model does not run.
    """
    if workload.amp is not None:
        raise UsageError("autocast on CUDA has no counterpart on the CPU", where="--amp", hint="leave it out")
    with _explained(target):
        tape = _tape(target, workload)
        events = _real(target, workload, {op.name.partition(".")[0] for op in tape.ops})
    sizes = {storage.nbytes for storage in tape.storages}
    kept, inside, numbers = _filtered(events, sizes)
    small = tuple(replace(s, nbytes=0) if s.nbytes <= _NUMBER else s for s in tape.storages)
    ordered = replace(tape, storages=small, events=_by_size(tape))
    found = compare(ordered, _recording(kept), from_step=1, most=_MOST)
    return _judged(target, found, inside, numbers, tape.unmodelled)


@contextlib.contextmanager
def _explained(target: str) -> Iterator[None]:
    """Whatever the model raises, as one sentence."""
    try:
        yield
    except FxmemError:
        raise
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        hint = "a model that names a CUDA device in its code cannot be verified on the CPU; --debug shows the traceback"
        raise TraceError(f"the run raised {type(error).__name__}: {text}", where=target, hint=hint) from error


def _judged(
    target: str, found: Comparison, inside: int, numbers: int, unmodelled: tuple[str, ...]
) -> Verification:  # fmt: skip
    differs = found.missing or found.longer or found.shorter or unmodelled
    return Verification(
        target=target, same=not differs, compared=found.compared, unmodelled=unmodelled,
        predicted=found.predicted, inside_kernels=inside + sum(group.count for group in found.extra), numbers=numbers,
        missing=found.missing, longer=found.longer, shorter=found.shorter,
    )  # fmt: skip


# ------------------------------------------------------------------ the two runs
def _tape(target: str, workload: Workload) -> Tape:
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    source = load(target, workload, fake_mode)
    recorder = Recorder(fake_mode)
    with source.opened():
        inputs = [source.inputs(workload.batch)]
        with recorder:
            run(source, inputs, workload, recorder, workload.step_count)
    return to_tape(recorder, batch=workload.batch, training=workload.training, modules=())


@contextlib.contextmanager
def _stderr_closed() -> Iterator[None]:
    """Keep off what torch's profiler writes past ``sys.stderr`` when it starts and stops."""
    if sys.stderr is not None:
        sys.stderr.flush()
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # there is no stderr
            kept = os.dup(2)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, 2)
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), 2)
        yield


class _Profiled:
    """Stops the profiler at the loop's end, while output and state are still bound."""

    def __init__(self, profiler: profile) -> None:
        self.phase = Phase.SETUP
        self._profiler = profiler
        self._running = True
        with _stderr_closed():
            profiler.start()

    def begin_step(self, step: int) -> None:
        """The first step begins with the profiler."""

    def end_steps(self) -> None:
        if self._running:
            self._running = False
            with _stderr_closed():
                self._profiler.stop()

    def name_gradients(self, params: Iterable[nn.Parameter]) -> None:
        """Needs no names."""

    def name_optimizer_state(self, state: Mapping[Any, Any], params: Iterable[nn.Parameter]) -> None:
        """Likewise."""


class _Feed:
    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs

    def next(self) -> Inputs:
        return self._inputs


def _real(target: str, workload: Workload, operators: set[str]) -> list[_Alloc]:
    """The CPU's allocations and frees during the steps, in order."""
    source = load_real(target, workload)
    with source.opened() as model:
        model.train(workload.training)
        inputs = source.inputs(workload.batch)
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        marks = _Profiled(profiler)
        try:
            loop(source, _Feed(inputs), workload, marks, workload.step_count)
        finally:
            marks.end_steps()
    kineto: Any = profiler.profiler
    return sorted(_walked(kineto.kineto_results.experimental_event_tree(), operators), key=lambda event: event.time)


def _walked(roots: Iterable[Any], operators: set[str]) -> Iterator[_Alloc]:
    """All allocations under these events, each with its operator."""
    waiting = [(event, "", 0) for event in roots]
    while waiting:
        event, name, ends = waiting.pop()
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            if fields.device.type == "cpu":
                yield _Alloc(event.start_time_ns, fields.ptr, fields.alloc_size, name, ends)
            continue
        if not ends and event.name.removeprefix("aten::") in operators:
            ends = event.end_time_ns
        waiting.extend((child, event.name, ends) for child in event.children)


# ------------------------------------------------------------------ what is compared
def _filtered(events: list[_Alloc], sizes: set[int]) -> tuple[list[_Alloc], int, int]:
    """Leave out numbers, and what lives within one operator or has a size that the tape does not know."""
    dies: dict[int, int] = {}
    freed: dict[int, int] = {}
    for at in range(len(events) - 1, -1, -1):
        event = events[at]
        if event.nbytes < 0:
            freed[event.address] = at
        elif event.address in freed:
            dies[at] = freed.pop(event.address)
    dropped: set[int] = set()
    inside = numbers = 0
    for at, event in enumerate(events):
        if event.nbytes <= 0:
            continue
        is_number = event.nbytes <= _NUMBER
        within = at in dies and events[dies[at]].time <= event.within
        if is_number or within or event.nbytes not in sizes:
            numbers, inside = numbers + is_number, inside + (not is_number)
            dropped |= {at, dies.get(at, at)}
    kept = [event for at, event in enumerate(events) if at not in dropped]
    return _sorted_within(kept), inside, numbers


def _sorted_within(events: list[_Alloc]) -> list[_Alloc]:
    """A kernel may make its results in any order: those of one operator by size."""
    found: list[_Alloc] = []
    for (birth, within), group in groupby(events, key=lambda event: (event.nbytes > 0, event.within)):
        members = list(group)
        found += sorted(members, key=lambda event: event.nbytes) if birth and within else members
    return found


def _by_size(tape: Tape) -> tuple[int, ...]:
    """The tape's events, the results of each operator likewise."""
    events = list(tape.events)
    for op in tape.ops:
        own = events[op.start : op.stop]
        if len(own) > 1 and min(own) >= 0:
            events[op.start : op.stop] = sorted(own, key=lambda e: tape.storages[e].nbytes)
    return tuple(events)


def _recording(events: list[_Alloc]) -> Recording:
    live: dict[int, int] = {}
    made: list[Recorded] = []
    found: list[int] = []
    for event in events:
        if event.nbytes > 0:
            live[event.address] = len(made)
            found.append(len(made))
            made.append(Recorded(event.nbytes, (), event.op))
        elif event.address in live:  # else it is older than the steps
            found.append(~live.pop(event.address))
    return Recording(allocations=tuple(made), before=0, events=tuple(found), peak_reserved_bytes=0)
