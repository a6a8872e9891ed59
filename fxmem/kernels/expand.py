"""Rewrite a tape by the kernel rules: insert what kernels take, order what they allocate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fxmem.kernels.conv_workspace import tape_questions
from fxmem.kernels.fft import ASSUMED
from fxmem.kernels.rules import RULES
from fxmem.kernels.steps import Out, Size, Step, Take, Target
from fxmem.tape import Op, Role, Storage, Tape


def expand(tape: Tape, target: Target) -> Tape:
    """Add the memory that kernels and libraries take on ``target``.

    Args:
        tape: As traced.
        target: The GPU.

    Returns:
        A tape with the same operators and more storages: indices of the given ones stay.
    """
    if target.workspaces is not None:  # all of the tape's questions to cuDNN at once
        target.workspaces.prepare(tape_questions([tape], target))
        tape = replace(tape, notes=(*tape.notes, *filter(None, [target.workspaces.note()])))
    assumed = {ASSUMED[op.name]: None for op in tape.ops if op.name in ASSUMED}
    tape = replace(tape, notes=(*tape.notes, *assumed))
    steps = [steps_of(op, target) for op in tape.ops]
    return finished(tape, steps, arrange(tape, steps))


def finished(
    tape: Tape, steps: Sequence[Sequence[Step] | None], layout: Layout, moved: tuple[Op, ...] | None = None
) -> Tape:
    """Write what :func:`arrange` found into a tape.

    Args:
        tape: As traced.
        steps: For each operator, see :func:`steps_of`.
        layout: Of this tape, or of one that differs only in sizes, and these steps.
        moved: The tape's operators at their new places, if they are at hand.
    """
    storages = list(tape.storages)
    for storage, op, at in layout.resized:
        storages[storage] = replace(storages[storage], nbytes=nbytes_of(steps, op, at))
    storages += [_taken(tape.ops[op], op, nth(steps, op, at)) for op, at in layout.taken]
    return replace(
        tape, ops=moved or layout.moved(tape.ops), events=layout.events, step_starts=layout.step_starts,
        storages=tuple(storages),
    )  # fmt: skip


def steps_of(op: Op, target: Target) -> Sequence[Step] | None:
    """What a call allocates, in order; ``None``: what the trace shows."""
    rule = RULES.get(op.name)
    return rule(op, target) if rule is not None and _on_device(op) else None


def nth(steps: Sequence[Sequence[Step] | None], op: int, at: int) -> Step:
    """A step of an operator that has some."""
    own = steps[op]
    assert own is not None
    return own[at]


def nbytes_of(steps: Sequence[Sequence[Step] | None], op: int, at: int) -> int:
    """The bytes of a ``Size`` or ``Take``."""
    step = nth(steps, op, at)
    assert isinstance(step, Size | Take)
    return step.nbytes


def shape_of(steps: Sequence[Step] | None) -> tuple[object, ...] | None:
    """All of the steps that :func:`arrange` looks at: bytes count only as none or some."""
    if steps is None:
        return None
    return tuple([
        (step.key, step.nbytes > 0, step.role, step.keep) if isinstance(step, Take)
        else (step.position, None) if isinstance(step, Size) else tuple(step)
        for step in steps
    ])  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The order of a tape's events after expansion, without the sizes."""

    events: tuple[int, ...]
    starts: tuple[int, ...]
    """Of each operator; likewise ``stops``."""
    stops: tuple[int, ...]
    step_starts: tuple[int, ...]
    taken: tuple[tuple[int, int], ...]
    """Operator and step of each storage that was added, by index."""
    resized: tuple[tuple[int, int, int], ...]
    """Storage, operator and step of each size that a rule gives."""

    def moved(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """The operators at their new places."""
        return tuple([
            op if op.start == start and op.stop == stop else replace(op, start=start, stop=stop)
            for op, start, stop in zip(ops, self.starts, self.stops, strict=True)
        ])  # fmt: skip


def arrange(tape: Tape, steps: Sequence[Sequence[Step] | None]) -> Layout:
    """Order a tape's events by the steps of its operators.

    Args:
        tape: As traced.
        steps: For each operator, see :func:`steps_of`.
    """
    return _Arranger(tape).run(steps)


class _Arranger:
    """Walks the tape once; never leaves :func:`arrange`."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.events: list[int] = []
        self.taken: list[tuple[int, int]] = []
        self.kept: set[tuple[str, str]] = set()
        self.resized: list[tuple[int, int, int]] = []

    def run(self, steps: Sequence[Sequence[Step] | None]) -> Layout:
        tape, events = self.tape, self.events
        begins: list[int] = []
        ends: list[int] = []
        starts: list[int] = []
        at = 0
        for i, (op, own) in enumerate(zip(tape.ops, steps, strict=True)):
            self._copy(at, op.start, starts)
            begins.append(len(events))
            self._op(i, op, own)
            at = op.stop
            ends.append(len(events))
        self._copy(at, len(tape.events), starts)
        starts += [len(events)] * (len(tape.step_starts) - len(starts))
        return Layout(
            events=tuple(events), starts=tuple(begins), stops=tuple(ends), step_starts=tuple(starts),
            taken=tuple(self.taken), resized=tuple(self.resized),
        )  # fmt: skip

    def _copy(self, start: int, stop: int, starts: list[int]) -> None:
        """Copy events outside operators; step boundaries always lie there."""
        bounds = self.tape.step_starts
        for i in range(start, stop):
            while len(starts) < len(bounds) and bounds[len(starts)] == i:
                starts.append(len(self.events))
            self.events.append(self.tape.events[i])
        while len(starts) < len(bounds) and bounds[len(starts)] == stop:
            starts.append(len(self.events))

    def _op(self, index: int, op: Op, steps: Sequence[Step] | None) -> None:
        own = self.tape.events[op.start : op.stop]
        if steps is None:
            self.events.extend(own)
            return
        born = {e for e in own if e >= 0}
        placed: set[int] = set()
        taken: dict[str, int] = {}
        for at, step in enumerate(steps):
            if isinstance(step, (Out, Size)):
                storage = op.outputs[step.position].storage if step.position < len(op.outputs) else -1
                if storage not in born:
                    continue
                if isinstance(step, Size):
                    self.resized.append((storage, index, at))
                elif storage not in placed:
                    placed.add(storage)
                    self.events.append(storage)
            elif isinstance(step, Take):
                self._take(step, op.thread, (index, at), taken)
            elif step.key in taken:
                self.events.append(~taken.pop(step.key))
        self.events.extend(e for e in own if e not in placed)
        self.events.extend(~s for s in _reversed(taken.values()))

    def _take(self, step: Take, thread: str, place: tuple[int, int], taken: dict[str, int]) -> None:
        if step.nbytes <= 0:
            return
        if step.keep:
            if (thread, step.key) in self.kept:
                return
            self.kept.add((thread, step.key))
        storage = len(self.tape.storages) + len(self.taken)
        self.taken.append(place)
        self.events.append(storage)
        if not step.keep:
            taken[step.key] = storage


def _taken(op: Op, index: int, step: Step) -> Storage:
    assert isinstance(step, Take)
    return Storage(
        nbytes=step.nbytes, role=step.role, shape=(step.nbytes,), dtype="uint8", op=index,
        name=step.key, module=op.module if step.role is not Role.WORKSPACE else "",
    )  # fmt: skip


def _on_device(op: Op) -> bool:
    """Whether a tensor of the call is on the device; host calls allocate nothing there."""
    return any(t.storage >= 0 for t in (*op.inputs, *op.outputs))


def _reversed(values: Iterable[int]) -> list[int]:
    return list(values)[::-1]
