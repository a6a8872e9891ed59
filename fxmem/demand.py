"""What a program asks of the allocator at any batch, without writing its tape.

The whole tape of a batch is the law's tape, continued to all steps, with what kernels take. Of that the
allocator sees only the order of the events and the sizes. The order is almost always that of another
batch, and calls that are equal but for their storages take equal memory: so at each batch one call of
each kind is put to the rules, and the events are arranged anew only where a rule answers otherwise than
before. The result is that of the whole tape, number for number (``tests/property/test_demand_property.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fxmem.affine import Parts, at_distance, fill_op, fill_storage, put_together, take_apart
from fxmem.kernels import Target, tape_questions
from fxmem.kernels.expand import Layout, arrange, finished, nbytes_of, shape_of, steps_of
from fxmem.kernels.steps import Step
from fxmem.law import BatchLaw
from fxmem.steady import extend
from fxmem.tape import Demand, Op, Tape, TensorMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """Calls that are equal but for their storages."""

    op: Op
    """One of them, at the base batch."""
    ints: list[int]
    growth: tuple[int, ...]

    def at(self, distance: int) -> Op:
        return fill_op(self.op, iter(at_distance(self.ints, self.growth, distance)))


class DemandLaw:
    """The demand of one program at every batch of its law. Made by :func:`demand_law`.

    Args:
        base: All steps at the law's first batch, without what kernels take.
        parts: Of ``base``.
        growth: Rate of each of its integers.
        target: The GPU whose kernels run.
    """

    def __init__(self, base: Tape, parts: Parts, growth: tuple[int, ...], target: Target) -> None:
        self._base, self._parts, self._growth, self._target = base, parts, growth, target
        count = len(base.storages)
        self._sizes = [parts.ints[mark] for mark in parts.marks[:count]]
        self._rates = [growth[mark] for mark in parts.marks[:count]]
        self._streams = [storage.stream for storage in base.storages]
        kinds: dict[object, int] = {}
        self._kinds: list[_Kind] = []
        self._kind_of: list[int] = []
        for op, (begin, end) in zip(base.ops, pairwise(parts.marks[count:]), strict=True):
            rates = growth[begin:end]
            at = kinds.setdefault((_face(op), rates), len(self._kinds))
            if at == len(self._kinds):
                self._kinds.append(_Kind(op=op, ints=parts.ints[begin:end], growth=rates))
            self._kind_of.append(at)
        self._constant = {at: steps_of(k.op, target) for at, k in enumerate(self._kinds) if not any(k.growth)}
        self._layouts: dict[object, Layout] = {}
        self._moved: dict[tuple[int, ...], tuple[Op, ...]] = {}

    def at(self, batch: int) -> Demand:
        """The demand of a batch that the law covers by its lines."""
        steps, layout = self._arranged(batch)
        sizes = at_distance(self._sizes, self._rates, batch - self._base.batch)
        for storage, op, at in layout.resized:
            sizes[storage] = nbytes_of(steps, op, at)
        sizes += [nbytes_of(steps, op, at) for op, at in layout.taken]
        streams = self._streams + [0] * len(layout.taken)
        return Demand(
            events=layout.events, step_starts=layout.step_starts, requests=tuple(zip(sizes, streams, strict=True))
        )

    def tape(self, batch: int) -> Tape:
        """The whole tape of a batch."""
        return finished(put_together(self._base, self._parts, self._growth, batch), *self._arranged(batch))

    def around(self, batch: int, event: int) -> Tape:
        """Write of the tape of a batch only what is live after an event.

        All other storages, and what the operators are called with, stay as at the base batch: enough to
        name what runs out of memory, in a fraction of the time.
        """
        steps, layout = self._arranged(batch)
        count, growth, marks = len(self._base.storages), self._growth, self._parts.marks
        if layout.events not in self._moved:
            self._moved[layout.events] = layout.moved(self._base.ops)
        storages = list(self._base.storages)
        for index in {e for e in layout.events[: event + 1] if e >= 0} - {~e for e in layout.events[: event + 1]}:
            begin, end = (marks[index], marks[index + 1]) if index < count else (0, 0)
            if any(growth[begin:end]):
                ints = at_distance(self._parts.ints[begin:end], growth[begin:end], batch - self._base.batch)
                storages[index] = fill_storage(storages[index], iter(ints))
        base = replace(self._base, batch=batch, storages=tuple(storages))
        return finished(base, steps, layout, self._moved[layout.events])

    def _arranged(self, batch: int) -> tuple[list[Sequence[Step] | None], Layout]:
        """The steps of every operator, and the order that they make."""
        distance, target = batch - self._base.batch, self._target
        asked = {at: kind.at(distance) for at, kind in enumerate(self._kinds) if at not in self._constant}
        if target.workspaces is not None:
            target.workspaces.prepare(tape_questions([replace(self._base, ops=tuple(asked.values()))], target))
        found = {at: steps_of(op, target) for at, op in asked.items()}
        key = tuple([shape_of(own) for own in found.values()])
        found |= self._constant
        steps = [found[at] for at in self._kind_of]
        if key not in self._layouts:
            self._layouts[key] = arrange(self._base, steps)
        return steps, self._layouts[key]


def demand_law(law: BatchLaw, steps: int, target: Target) -> DemandLaw | None:
    """Prepare the demand at every batch.

    Args:
        law: Of the recorded steps.
        steps: Steps of the loop.
        target: The GPU whose kernels run.

    Returns:
        ``None`` where the law has no lines or the last step does not repeat.
    """
    if law.lines is None:
        return None
    first = law.lines.tape.batch
    base, second = (extend(law.at(batch), steps) for batch in (first, first + 1))
    if base is None or second is None:
        return None
    parts = take_apart(base)
    growth = tuple([high - low for low, high in zip(parts.ints, take_apart(second).ints, strict=True)])
    return DemandLaw(base, parts, growth, target)


def _face(op: Op) -> object:
    """All that a rule may look at; storages are numbered in the order in which the call names them."""
    names: dict[int, int] = {-1: -1}
    metas = [[_renamed(meta, names) for meta in metas] for metas in (op.inputs, op.outputs)]
    return (op.name, op.phase, op.thread, *map(tuple, metas), repr(op.args), repr(op.kwargs))


def _renamed(meta: TensorMeta, names: dict[int, int]) -> Iterable[object]:
    return (names.setdefault(meta.storage, len(names)), *meta[1:])
