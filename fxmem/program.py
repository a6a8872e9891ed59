"""The whole tapes of a program at any batch, or along another axis: written by a law, or traced.

"Whole": all steps of the workload and what kernels take. Each is made once and kept. Between tapes with
the same events the sizes can be interpolated, which is how a search gets close without writing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Protocol

from fxmem.demand import DemandLaw, demand_law
from fxmem.kernels import Target, expand
from fxmem.law import BatchLaw, Piece
from fxmem.liveness import collector_paused
from fxmem.steady import extend
from fxmem.tape import Demand, Tape

MAX_BATCH = 2**24
"""Where a search ends: memory that does not limit the batch here does not limit it."""
MAX_TRACES = 8
_STRIDE = 8
"""The second tape of a line lies an eighth below the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Requests at any value, on curves through the sizes of tapes with the same events."""

    events: tuple[int, ...] = field(repr=False)
    streams: tuple[int, ...] = field(repr=False)
    values: tuple[int, ...]
    """Where the tapes are; two make lines, three parabolas."""
    sizes: tuple[tuple[int, ...], ...] = field(repr=False)
    """For each storage its size in each of the tapes."""

    def requests(self, value: int) -> list[tuple[int, int]]:
        """Bytes and stream of each storage."""
        weights = [_weight(self.values, index, value) for index in range(len(self.values))]
        whole = math.lcm(*(weight.denominator for weight in weights))
        factors = [int(weight * whole) for weight in weights]
        sizes = [_at(row, factors, whole) for row in self.sizes]
        return list(zip(sizes, self.streams, strict=True))


def _at(row: tuple[int, ...], factors: Sequence[int], whole: int) -> int:
    first = row[0]
    if all(size == first for size in row):
        return first
    return max(sum(map(int.__mul__, row, factors)) // whole, 0)


def _weight(values: Sequence[int], index: int, value: int) -> Fraction:
    """Of one tape in Lagrange's interpolation."""
    own = values[index]
    others = [other for at, other in enumerate(values) if at != index]
    return math.prod((Fraction(value - other, own - other) for other in others), start=Fraction(1))


class Program(Protocol):
    """What a search for the largest value asks of a program."""

    axis: str
    """What the values are: ``batch``, ``seq``, ``image``."""
    first: int
    last: int
    """The values looked at, both included."""
    traced: list[int]
    """Values that had to be traced."""
    why: str
    """Why they had to be."""
    calibrated: bool
    """Whether a guess is likely to be right."""

    @property
    def exhausted(self) -> bool:
        """Whether no further value may be traced."""

    def at(self, value: int, /) -> Tape | None:
        """The whole tape; ``None``: not known, and it may not or cannot be traced."""

    def demand(self, value: int, /) -> Demand | None:
        """What the whole tape asks of the allocator; ``None`` as for :meth:`at`."""

    def around(self, value: int, event: int, /) -> Tape | None:
        """The whole tape, of which only what is live after an event has to be right."""

    def line(self, value: int, /) -> Line | None:
        """Curves that hold near a value; ``None`` where the known tapes differ."""

    def guess(self, room: int, /) -> int:
        """The value to begin with."""

    def slope(self) -> float:
        """Bytes by which the peak grows with the value, 0 where that is not known."""

    def learn(self, fits: int, fails: int, room: int, /) -> None:
        """Keep an answer, for further guesses."""


class Tapes:
    """A program along its batch.

    Args:
        law: What is known of it.
        steps: Steps of its loop.
        target: The GPU whose kernels run.
        trace: Traces a batch that the law does not cover, all steps of it; ``None`` where the program
            does not run at this batch.
        limit: How often ``trace`` may be called.
    """

    axis = "batch"
    first = 1
    last = MAX_BATCH

    def __init__(
        self, law: BatchLaw, steps: int, target: Target, trace: Callable[[int], Tape | None] | None = None,
        limit: int = MAX_TRACES,
    ) -> None:  # fmt: skip
        self.law = law
        self.traced: list[int] = []
        self.calibrated = False
        self.why = "" if law.exact else f"no batch law ({law.why})"
        self._steps = steps
        self._target = target
        self._trace = trace
        self._limit = limit
        self._known: dict[int, Demand] = {}
        self._failed: set[int] = set()
        self._traced: dict[int, Tape] = {}
        self._overhead: dict[int, float] = {}

    @cached_property
    def _lines(self) -> DemandLaw | None:
        with collector_paused():
            return demand_law(self.law, self._steps, self._target)

    @cached_property
    def _pieces(self) -> tuple[Piece, ...]:
        return self.law.pieces()

    @property
    def exhausted(self) -> bool:
        """Whether no further batch may be traced."""
        return self._trace is None or len(self.traced) >= self._limit

    def at(self, batch: int) -> Tape | None:
        """The tape at a batch with all steps and kernels; ``None``: not known, and none may be traced."""
        with collector_paused():
            return self._lines.tape(batch) if self._lines is not None and self._on_lines(batch) else self._alone(batch)

    def demand(self, batch: int) -> Demand | None:
        """What that tape asks of the allocator."""
        if batch not in self._known:
            with collector_paused():
                if self._lines is not None and self._on_lines(batch):
                    self._known[batch] = self._lines.at(batch)
                elif (tape := self._alone(batch)) is not None:
                    self._known[batch] = tape.demand
        return self._known.get(batch)

    def around(self, batch: int, event: int) -> Tape | None:
        """That tape, as far as it names what is live after an event."""
        with collector_paused():
            if self._lines is not None and self._on_lines(batch):
                return self._lines.around(batch, event)
            return self._alone(batch)

    def line(self, batch: int) -> Line | None:
        """The line through the two tapes nearest to a batch; ``None`` where their events differ."""
        below = max(batch - max(batch // _STRIDE, 1), 1)
        if len(self._known) < 2 and self._on_lines(below):
            self.demand(below)
        return _curve(self._known, batch, 2)

    def guess(self, room: int) -> int:
        """The largest batch whose requested bytes, with what the allocator wasted nearby, do not pass the limit."""
        pieces = self._pieces
        plain = self._guess(room)
        if self._overhead and pieces:
            plain = self._guess(int(room / self._overhead[min(self._overhead, key=lambda known: abs(known - plain))]))
        return plain

    def learn(self, fits: int, fails: int, room: int) -> None:
        """Keep what share of a limit was used by requests, at the middle between an answer and the next batch."""
        requested = [
            next((piece.at(batch) for piece in self._pieces if piece.covers(batch)), 0) for batch in (fits, fails)
        ]
        if all(requested):
            self._overhead[fits] = 2 * room / sum(requested)
            self.calibrated = True

    def slope(self) -> float:
        """Bytes per sample between the two largest batches that stand for themselves in the law."""
        points = [piece for piece in self._pieces if piece.from_batch == piece.to_batch][-2:]
        if len(points) < 2:
            return 0.0
        return (points[1].fixed_bytes - points[0].fixed_bytes) / (points[1].from_batch - points[0].from_batch)

    def _guess(self, room: int) -> int:
        pieces = self._pieces
        best = max((batch for piece in pieces if (batch := _last_within(piece, room))), default=1)
        if pieces and pieces[-1].to_batch is not None and self.slope() > 0:
            best = pieces[-1].from_batch + math.floor((room - pieces[-1].fixed_bytes) / self.slope())
        return best

    def _on_lines(self, batch: int) -> bool:
        lines = self.law.lines
        return lines is not None and batch >= lines.tape.batch

    def _alone(self, batch: int) -> Tape | None:
        """A batch beside the lines: known from the law, or traced."""
        if batch in self._traced or batch in self._failed:
            return self._traced.get(batch)
        tape = extend(self.law.at(batch), self._steps) if self.law.covers(batch) else None
        if tape is None:
            if self._trace is None or self.exhausted:
                return None
            self.traced.append(batch)
            tape = self._trace(batch)
        if tape is None:
            self._failed.add(batch)
            return None
        self._traced[batch] = expand(tape, self._target)
        return self._traced[batch]


class VariedTapes:
    """A program along another axis than the batch: sequence length or image size.

    Sizes are polynomials of the second degree there (attention's scores, an image's area); three
    traces give them, and what they say is proved by tracing the answer.

    Args:
        axis: ``seq`` or ``image``.
        values: The first and the last value looked at.
        target: The GPU whose kernels run.
        trace: Traces a value, all steps of it; ``None`` where the program does not run at this value.
        limit: How often ``trace`` may be called.
    """

    def __init__(
        self, axis: str, values: tuple[int, int], target: Target, trace: Callable[[int], Tape | None],
        limit: int = 2 * MAX_TRACES,
    ) -> None:  # fmt: skip
        self.axis = axis
        self.first, self.last = values
        self.traced: list[int] = []
        self.calibrated = False
        self.why = f"memory is a polynomial of {axis}, found from traces and proved by one"
        self._target = target
        self._trace = trace
        self._limit = limit
        self._written: dict[int, Tape | None] = {}

    @property
    def exhausted(self) -> bool:
        """Whether no further value may be traced."""
        return len(self.traced) >= self._limit

    def at(self, value: int) -> Tape | None:
        """The whole tape at a value; ``None``: it does not run, or no more may be traced."""
        if value not in self._written:
            if self.exhausted:
                return None
            self.traced.append(value)
            tape = self._trace(value)
            self._written[value] = None if tape is None else expand(tape, self._target)
        return self._written[value]

    def line(self, value: int) -> Line | None:
        """Parabolas through three tapes; ``None`` until there are so many with the same events."""
        known = {at: tape.demand for at, tape in self._written.items() if tape is not None}
        return _curve(known, value, 3)

    def demand(self, value: int) -> Demand | None:
        """What the whole tape at a value asks of the allocator."""
        tape = self.at(value)
        return None if tape is None else tape.demand

    def around(self, value: int, event: int) -> Tape | None:  # noqa: ARG002 - part of the protocol
        """The whole tape."""
        return self.at(value)

    def learn(self, fits: int, fails: int, room: int) -> None:
        """Nothing to guess from here."""

    def guess(self, room: int) -> int:  # noqa: ARG002 - part of the protocol
        """The smallest value."""
        return self.first

    def slope(self) -> float:
        """Not known: the search doubles the value."""
        return 0.0


def _curve(known: dict[int, Demand], value: int, count: int) -> Line | None:
    """Curves through the ``count`` demands nearest to a value; ``None`` where they differ in their events."""
    near = sorted(known.items(), key=lambda item: abs(item[0] - value))[:count]
    if len(near) < count:
        return None
    base = near[0][1]
    if any(other.events != base.events or len(other.requests) != len(base.requests) for _, other in near[1:]):
        return None
    return Line(
        events=base.events,
        streams=tuple([stream for _, stream in base.requests]),
        values=tuple([at for at, _ in near]),
        sizes=tuple(zip(*([nbytes for nbytes, _ in demand.requests] for _, demand in near), strict=True)),
    )


def _last_within(piece: Piece, room: int) -> int | None:
    """The last batch of a piece at which it does not pass ``room``."""
    if piece.at(piece.from_batch) > room:
        return None
    last = MAX_BATCH if piece.to_batch is None else piece.to_batch
    if piece.per_sample_bytes:
        last = min(last, (room - piece.fixed_bytes) // piece.per_sample_bytes)
    return last
