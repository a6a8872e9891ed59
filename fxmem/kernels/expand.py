"""Rewrite a tape by the kernel rules: insert what kernels take, order what they allocate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fxmem.kernels.conv_workspace import tape_questions
from fxmem.kernels.rules import RULES
from fxmem.kernels.steps import Out, Size, Take, Target
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
    expander = _Expander(tape, target)
    return expander.run()


class _Expander:
    """Walks the tape once; never leaves :func:`expand`."""

    def __init__(self, tape: Tape, target: Target) -> None:
        self.tape = tape
        self.target = target
        self.events: list[int] = []
        self.extra: list[Storage] = []
        self.kept: set[tuple[str, str]] = set()
        self.sizes: dict[int, int] = {}

    def run(self) -> Tape:
        tape, events = self.tape, self.events
        ops: list[Op] = []
        starts: list[int] = []
        at = 0
        for i, op in enumerate(tape.ops):
            self._copy(at, op.start, starts)
            begin = len(events)
            self._op(i, op)
            at = op.stop
            moved = begin != op.start or len(events) != op.stop
            ops.append(replace(op, start=begin, stop=len(events)) if moved else op)
        self._copy(at, len(tape.events), starts)
        starts += [len(events)] * (len(tape.step_starts) - len(starts))
        return replace(
            tape, ops=tuple(ops), events=tuple(events), step_starts=tuple(starts),
            storages=(*self._resized(), *self.extra),
        )  # fmt: skip

    def _resized(self) -> tuple[Storage, ...]:
        """The traced storages, with the sizes that rules gave."""
        if not self.sizes:
            return self.tape.storages
        storages = list(self.tape.storages)
        for index, nbytes in self.sizes.items():
            storages[index] = replace(storages[index], nbytes=nbytes)
        return tuple(storages)

    def _copy(self, start: int, stop: int, starts: list[int]) -> None:
        """Copy events outside operators; step boundaries always lie there."""
        bounds = self.tape.step_starts
        for i in range(start, stop):
            while len(starts) < len(bounds) and bounds[len(starts)] == i:
                starts.append(len(self.events))
            self.events.append(self.tape.events[i])
        while len(starts) < len(bounds) and bounds[len(starts)] == stop:
            starts.append(len(self.events))

    def _op(self, index: int, op: Op) -> None:
        rule = RULES.get(op.name)
        steps = rule(op, self.target) if rule is not None and _on_device(op) else None
        own = self.tape.events[op.start : op.stop]
        if steps is None:
            self.events.extend(own)
            return
        born = {e for e in own if e >= 0}
        placed: set[int] = set()
        taken: dict[str, int] = {}
        for step in steps:
            if isinstance(step, (Out, Size)):
                storage = op.outputs[step.position].storage if step.position < len(op.outputs) else -1
                if storage not in born:
                    continue
                if isinstance(step, Size):
                    self.sizes[storage] = step.nbytes
                elif storage not in placed:
                    placed.add(storage)
                    self.events.append(storage)
            elif isinstance(step, Take):
                self._take(index, op, step, taken)
            elif step.key in taken:
                self.events.append(~taken.pop(step.key))
        self.events.extend(e for e in own if e not in placed)
        self.events.extend(~s for s in _reversed(taken.values()))

    def _take(self, index: int, op: Op, step: Take, taken: dict[str, int]) -> None:
        if step.nbytes <= 0:
            return
        if step.keep:
            if (op.thread, step.key) in self.kept:
                return
            self.kept.add((op.thread, step.key))
        storage = len(self.tape.storages) + len(self.extra)
        made = Storage(
            nbytes=step.nbytes, role=step.role, shape=(step.nbytes,), dtype="uint8", op=index, name=step.key,
            module=op.module if step.role is not Role.WORKSPACE else "",
        )  # fmt: skip
        self.extra.append(made)
        self.events.append(storage)
        if not step.keep:
            taken[step.key] = storage


def _on_device(op: Op) -> bool:
    """Whether a tensor of the call is on the device; host calls allocate nothing there."""
    return any(t.storage >= 0 for t in (*op.inputs, *op.outputs))


def _reversed(values: Iterable[int]) -> list[int]:
    return list(values)[::-1]
