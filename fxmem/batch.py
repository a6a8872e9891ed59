"""The largest batch that fits: found on interpolated sizes, proved by replaying whole tapes.

A batch fits if the replay of its tape by the allocator does not run out of memory. While the batch law
holds, no tape has to be traced for that: sizes between two written tapes with the same events are
interpolated and replayed, which leads close to the answer at little cost; then the tapes of the answer
and of the next batch are written in full (law, steps, kernels) and replayed. Kernels choose by size, so
the interpolation may be off: what is answered is what the full tapes say. Without a law each batch
that is looked at must be traced: parabolas through the traced ones lead the search, where they fail a
bracket is halved, and what was proved until the limit of traces is answered.

More than one batch may be the last that fits before one that does not (fragmentation): the answer is
one of them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fxmem.allocator import Plan, replay, shortage
from fxmem.allocator_config import AllocatorConfig
from fxmem.errors import UsageError
from fxmem.estimate import Estimate, MaxBatch, PeakAt, place
from fxmem.program import Line, Program

_TURNS = 8
"""Predictions from lines that may miss; then the bracket is halved."""
_REACH = 64
"""How many times the last value a curve may lead to while no value is known that does not fit."""
_LEAP = 8
"""Likewise the slope between two values."""
_WIDE = 4
"""A bracket whose ends are further apart than this is no line."""


class Bound(str, enum.Enum):
    """What ends the search at the answer."""

    MEMORY = "memory"
    RANGE = "range"
    """The last value looked at fits."""
    PROGRAM = "program"
    """The next value does not run."""
    UNKNOWN = "unknown"
    """The limit of traces."""

    __str__ = str.__str__


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the device leaves to one process.

    Raises:
        UsageError: A value is out of range.
    """

    capacity_bytes: int
    context_bytes: int | None = None
    """``None``: not known, nothing is taken off for it."""
    safety: float = 0.9
    """Share of the memory that may be used."""
    reserve_bytes: int = 0
    """For the system, the driver and other tenants."""
    processes: int = 1
    """Replicas on the device, each with its own context and allocator."""

    def __post_init__(self) -> None:
        if not 0.0 < self.safety <= 1.0:
            raise UsageError(f"--safety is {self.safety:g}, it must lie above 0 and not above 1")
        if self.reserve_bytes < 0 or self.processes < 1:
            raise UsageError("--reserve must not be negative and --processes at least 1")

    @property
    def allocator_bytes(self) -> int:
        """What the caching allocator of one process may reserve; not positive where nothing is left.

        >>> Limits(capacity_bytes=10_000, context_bytes=500, reserve_bytes=1000, processes=2).allocator_bytes
        3550
        """
        share = int((self.capacity_bytes - self.reserve_bytes) * self.safety) // self.processes
        return share - (self.context_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Why a batch does not fit: the first request that fails, after all cached blocks were released."""

    batch: int
    requested_bytes: int
    missing_bytes: int
    """How much more the allocator would need to serve that request; later ones may need more."""
    segment_bytes: int
    """What it asks the driver for: reserved and segment bytes are the limit and ``missing_bytes``."""
    allocated_bytes: int
    reserved_bytes: int
    """Allocated bytes, and free blocks that do not hold the request."""
    at: PeakAt
    """The moment of the request, and the largest tensors that are live then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswer:
    """The largest batch that fits."""

    batch: int
    """0 where not even the smallest one fits. A sequence length or an image size if ``axis`` says so."""
    limits: Limits
    allocator_bytes: int
    """What one process may reserve under these limits."""
    reserved_bytes: int
    """Peak of the reserved memory at the answer; 0 for batch 0."""
    releases: int = 0
    """How often the answer fits only because cached blocks are given back to the driver, which costs time."""
    next: Shortfall | None = None
    """The next batch; ``None`` where it is not known not to fit."""
    multiple_of: int = 1
    proved: bool = True
    """Whether the answer's and the next batch's whole tapes were replayed."""
    bound: Bound = Bound.MEMORY
    traces: int = 0
    """Batches that had to be traced for the search."""
    axis: str = "batch"
    notes: tuple[str, ...] = ()

    @property
    def margin_bytes(self) -> int:
        """What is left of ``allocator_bytes`` at the answer."""
        return self.allocator_bytes - self.reserved_bytes


def largest(program: Program, config: AllocatorConfig, limits: Limits, multiple_of: int = 1) -> BatchAnswer:
    """Find the largest batch for which the replay does not run out of memory.

    Args:
        program: Its tapes; answers for other limits are cheaper with the same program.
        config: The allocator's options.
        limits: What the device leaves to one process.
        multiple_of: Only multiples of this are looked at.

    Returns:
        The answer, with the next batch's shortfall.

    Raises:
        UsageError: ``multiple_of`` is not positive.
    """
    if multiple_of < 1:
        raise UsageError(f"--multiple-of is {multiple_of}, it must be at least 1")
    search = _Search(program, config, limits.allocator_bytes, multiple_of)
    search.run()
    return search.answer(limits)


def not_searched(limits: Limits) -> BatchAnswer:
    """The answer where each batch would have to be traced, and that was not asked for."""
    note = "no batch law, so what lies beside this batch was not traced: `fxmem batch` traces"
    return BatchAnswer(
        batch=0, limits=limits, allocator_bytes=limits.allocator_bytes, reserved_bytes=0, proved=False,
        bound=Bound.UNKNOWN, notes=(note,),
    )  # fmt: skip


def leaving(estimate: Estimate, reserve_bytes: int) -> Estimate:
    """The estimate where others hold ``reserve_bytes`` of the device.

    Raises:
        UsageError: ``reserve_bytes`` is negative.
    """
    if reserve_bytes < 0:
        raise UsageError(f"{reserve_bytes} bytes cannot be kept for others", hint="give 0 or more")
    if not reserve_bytes or estimate.device.capacity_bytes is None:
        return estimate
    peak = estimate.peak
    needed = peak.reserved_bytes if peak.device_bytes is None else peak.device_bytes
    fits = bool(estimate.fits) and needed + reserve_bytes <= estimate.device.capacity_bytes
    return replace(estimate, fits=fits)


def with_max_batch(estimate: Estimate, answer: BatchAnswer) -> Estimate:
    """Put the largest batch, and what must be said of it, into an estimate."""
    limits = answer.limits
    largest_batch = MaxBatch(
        batch=answer.batch if answer.batch or answer.proved else None, safety=limits.safety,
        reserved_for_others_bytes=limits.reserve_bytes, proved=answer.proved,
    )  # fmt: skip
    notes = (*estimate.coverage.notes, *(f"largest batch: {note}" for note in answer.notes))
    return replace(estimate, max_batch=largest_batch, coverage=replace(estimate.coverage, notes=notes))


class _Search:
    """A bracket that closes: ``low`` fits, ``high`` does not. Counts in units of ``unit`` samples."""

    def __init__(self, program: Program, config: AllocatorConfig, room: int, unit: int) -> None:
        self.program, self.config, self.room, self.unit = program, config, room, unit
        self.low = -(-program.first // unit) - 1
        self.high = program.last // unit + 1
        self.plans: dict[int, Plan] = {}
        self.calibrated = program.calibrated
        """Whether former answers make the first guess a good one: then its neighbour is the next."""
        self.predicted: int | None = None
        self.unknown: int | None = None
        """The batch at which the search ended because its tape is not known."""

    def run(self) -> None:
        self._recall()
        turn = 0
        while self.room > 0 and self.high - self.low > 1 and self.unknown is None:
            self._probe(min(max(self._guess(turn), self.low + 1), self.high - 1))
            turn += 1
        if self.low in self.plans and self.high in self.plans:
            self.program.learn(self.low * self.unit, self.high * self.unit, self.room)

    def answer(self, limits: Limits) -> BatchAnswer:
        fitting = self.plans.get(self.low)
        failing = self.high if self.high in self.plans else None
        return BatchAnswer(
            batch=0 if fitting is None else self.low * self.unit,
            limits=limits,
            allocator_bytes=self.room,
            reserved_bytes=0 if fitting is None else fitting.peak_reserved_bytes,
            releases=0 if fitting is None else fitting.retries,
            next=None if failing is None else self._shortfall(failing),
            multiple_of=self.unit,
            proved=self.room <= 0 or self.high - self.low == 1,
            bound=self._bound(),
            traces=len(self.program.traced),
            axis=self.program.axis,
            notes=tuple(self._notes()),
        )

    def _recall(self) -> None:
        """Close the bracket as far as tapes do that are there already; the largest that fits counts."""
        if self.room <= 0:
            return
        known = [value // self.unit for value in self.program.known if value % self.unit == 0]
        for unit in known:
            self._replay(unit)
        self.low = max((unit for unit in known if self.plans[unit].oom is None), default=self.low)
        failing = [unit for unit in known if self.plans[unit].oom is not None]
        if self.low in self.plans:
            failing += [value // self.unit for value in self.program.failed if value % self.unit == 0]
        self.high = min((unit for unit in failing if unit > self.low), default=self.high)

    def _replay(self, unit: int) -> Plan | None:
        """Replay the whole tape at a batch; ``None`` where there is none."""
        demand = self.program.demand(unit * self.unit)
        if demand is None:
            return None
        self.plans[unit] = replay(demand, self.config, self.room)
        return self.plans[unit]

    def _probe(self, unit: int) -> None:
        plan = self._replay(unit)
        if plan is None and not self._fails(unit):
            self.unknown = unit * self.unit
        elif plan is None and self.low not in self.plans and self.high in self.plans:
            self.low = unit  # larger ones run: what is too small does not bound the batch from above
        elif plan is None or plan.oom is not None:
            self.high = unit
        else:
            self.low = unit

    def _fails(self, unit: int) -> bool:
        """Whether the program is known not to run at a batch."""
        return unit * self.unit in self.program.failed

    def _bound(self) -> Bound:
        if self.room <= 0:
            return Bound.MEMORY
        if self.high - self.low > 1:
            return Bound.UNKNOWN
        if self._fails(self.high):
            return Bound.PROGRAM
        return Bound.MEMORY if self.high in self.plans else Bound.RANGE

    def _guess(self, turn: int) -> int:
        """The unit to look at next; the caller keeps it within the bracket."""
        if turn == 0:
            start = self.program.guess(self.room) // self.unit
            if not self.plans or self.low < start < self.high:
                return start
        if self.predicted == self.low:
            # Near the limit the next one proves it; a curve that ends with a quarter left over leads nowhere.
            left = self.room - self.plans[self.low].peak_reserved_bytes
            return self.low + 1 if left <= self.room // 4 else self._between(turn)
        last = next(reversed(self.plans), None)
        if last is None:
            return self._middle()
        if turn == 1 and self.calibrated:
            return last + 1 if last == self.low else last - 1
        line = self.program.line(last * self.unit) if turn < _TURNS else None
        if line is None:
            return self._between(turn)
        found = self._boundary(line, last)
        # The curve knows memory only: not why a program does not run, and little of what lies far away.
        if found == self.high - 1 and self._fails(self.high):
            return self._middle()
        if self.high not in self.plans and found > _REACH * last:
            return _REACH * last
        self.predicted = found
        return found

    def _boundary(self, line: Line, last: int) -> int:
        """The last unit that fits by the line: stride away from ``last``, then halve."""

        def fits(unit: int) -> bool:
            return shortage(line.events, line.requests(unit * self.unit), self.config, self.room) is None

        low, high, stride = self.low, self.high, max(last // 32, 1)
        while high - low > 1:
            far = low + stride if low == last else high - stride if high == last else None
            unit = (low + high) // 2 if far is None or not low < far < high else far
            if fits(unit):
                low, last = unit, unit if low == last else last
            else:
                high, last = unit, unit if high == last else last
            stride *= 2
        return low

    def _between(self, turn: int) -> int:
        """The next batch to trace: where a line through the bracket's ends meets the limit; in turns its middle."""
        if self.low not in self.plans or self._fails(self.high):
            return self._middle()
        need = self.plans[self.low].peak_reserved_bytes
        if self.high not in self.plans:
            # Three values near each other make a parabola; where they did not, the slope leads on.
            below = max((unit for unit in self.plans if unit < self.low), default=None)
            rise = 0 if below is None else need - self.plans[below].peak_reserved_bytes
            if below is None or len(self.plans) < 3 or rise <= 0:
                return 2 * self.low
            return min(self.low + (self.room - need) * (self.low - below) // rise, _LEAP * self.low)
        if turn % 3 == 0 or self.high > _WIDE * self.low:
            return self._middle()
        rise = self._need(self.high) - need
        return self.low + (self.room - need) * (self.high - self.low) // rise if rise > 0 else self.low

    def _middle(self) -> int:
        """By ratio while the ends are of different orders of magnitude: half of a far end is as far."""
        near = max(self.low, 1)
        return math.isqrt(near * self.high) if self.high > _WIDE * near else (self.low + self.high) // 2

    def _need(self, unit: int) -> int:
        """What a batch that does not fit would reserve without a limit."""
        demand = self.program.demand(unit * self.unit)
        assert demand is not None
        return replay(demand, self.config).peak_reserved_bytes

    def _shortfall(self, unit: int) -> Shortfall:
        batch, oom = unit * self.unit, self.plans[unit].oom
        assert oom is not None
        tape = self.program.around(batch, oom.event)
        assert tape is not None
        segment = self.config.segment_size(self.config.round_size(oom.requested_bytes))
        return Shortfall(
            batch=batch,
            requested_bytes=oom.requested_bytes,
            missing_bytes=max(oom.reserved_bytes + segment - oom.capacity_bytes, 1),
            segment_bytes=segment,
            allocated_bytes=oom.allocated_bytes,
            reserved_bytes=oom.reserved_bytes,
            at=place(tape, oom.event),
        )

    def _notes(self) -> Iterator[str]:
        program, axis = self.program, self.program.axis
        if self.room <= 0:
            yield "the CUDA context and what is kept free leave nothing to the allocator"
        if self.low == program.last // self.unit:
            why = "memory does not limit it" if axis == "batch" else "the end of the range, widen it"
            yield f"the search ends at {axis} {self.low * self.unit}: {why}"
        if self.unknown is not None:
            yield f"{self._proved()}{axis} {self.unknown} was not traced (limit of traces or time): not proved"
        if self._fails(self.high):
            yield f"{axis} {self.high * self.unit} and more do not run: {program.failed[self.high * self.unit].what}"
        if self._fails(self.low):
            yield f"{axis} {self.low * self.unit} does not run: {program.failed[self.low * self.unit].what}"
        if program.traced and program.why:
            yield f"{program.why}: traced at {axis} {', '.join(map(str, program.traced))}"

    def _proved(self) -> str:
        """What is known when the search has to end before the answer."""
        ends = [f"it fits at {self.low * self.unit}"] if self.low in self.plans else []
        if self.high in self.plans:
            ends.append(f"it does not fit at {self.high * self.unit}")
        return f"{', '.join(ends)}; " if ends else ""
