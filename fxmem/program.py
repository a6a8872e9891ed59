"""The whole tapes of a program at any batch, or along another axis: written by a law, or traced.

"Whole": all steps of the workload and what kernels take. Each is made once and kept. Between tapes with
the same events the sizes can be interpolated, which is how a search gets close without writing more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from fxmem.kernels import Target, expand
from fxmem.law import BatchLaw, Piece
from fxmem.liveness import collector_paused
from fxmem.steady import extend
from fxmem.tape import Tape

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

    @property
    def exhausted(self) -> bool:
        """Whether no further value may be traced."""

    def at(self, value: int, /) -> Tape | None:
        """The whole tape; ``None``: not known, and it may not or cannot be traced."""

    def line(self, value: int, /) -> Line | None:
        """Curves that hold near a value; ``None`` where the known tapes differ."""

    def guess(self, room: int, /) -> int:
        """The value to begin with."""

    def slope(self) -> float:
        """Bytes by which the peak grows with the value, 0 where that is not known."""


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
        self.why = "" if law.exact else f"no batch law ({law.why})"
        self._steps = steps
        self._target = target
        self._trace = trace
        self._limit = limit
        self._written: dict[int, Tape | None] = {}

    @property
    def exhausted(self) -> bool:
        """Whether no further batch may be traced."""
        return self._trace is None or len(self.traced) >= self._limit

    def at(self, batch: int) -> Tape | None:
        """The tape at a batch with all steps and kernels; ``None``: not known, and none may be traced."""
        if batch not in self._written:
            with collector_paused():
                tape = self._raw(batch)
                if tape is None and self.exhausted:
                    return None
                self._written[batch] = None if tape is None else expand(tape, self._target)
        return self._written[batch]

    def line(self, batch: int) -> Line | None:
        """The line through the two tapes nearest to a batch; ``None`` where their events differ."""
        below = max(batch - max(batch // _STRIDE, 1), 1)
        if sum(tape is not None for tape in self._written.values()) < 2 and self.law.exact and self.law.covers(below):
            self.at(below)
        return _curve(self._written, batch, 2)

    def guess(self, room: int) -> int:
        """The largest batch whose requested bytes alone do not pass the limit."""
        pieces = self.law.pieces()
        best = max((batch for piece in pieces if (batch := _last_within(piece, room))), default=1)
        if pieces and pieces[-1].to_batch is not None and self.slope() > 0:
            best = pieces[-1].from_batch + math.floor((room - pieces[-1].fixed_bytes) / self.slope())
        return best

    def slope(self) -> float:
        """Bytes per sample between the two largest batches that stand for themselves in the law."""
        points = [piece for piece in self.law.pieces() if piece.from_batch == piece.to_batch][-2:]
        if len(points) < 2:
            return 0.0
        return (points[1].fixed_bytes - points[0].fixed_bytes) / (points[1].from_batch - points[0].from_batch)

    def _raw(self, batch: int) -> Tape | None:
        if self.law.covers(batch):
            longer = extend(self.law.at(batch), self._steps)
            if longer is not None:
                return longer
        if self._trace is None or self.exhausted:
            return None
        self.traced.append(batch)
        return self._trace(batch)


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
        return _curve(self._written, value, 3)

    def guess(self, room: int) -> int:  # noqa: ARG002 - part of the protocol
        """The smallest value."""
        return self.first

    def slope(self) -> float:
        """Not known: the search doubles the value."""
        return 0.0


def _curve(written: dict[int, Tape | None], value: int, count: int) -> Line | None:
    """Curves through the ``count`` tapes nearest to a value; ``None`` where they differ in their events."""
    near = sorted(_known(written), key=lambda item: abs(item[0] - value))[:count]
    base = near[0][1] if near else None
    if base is None or len(near) < count:
        return None
    if any(tape.events != base.events or len(tape.storages) != len(base.storages) for _, tape in near[1:]):
        return None
    return Line(
        events=base.events,
        streams=tuple([storage.stream for storage in base.storages]),
        values=tuple([at for at, _ in near]),
        sizes=tuple(zip(*([storage.nbytes for storage in tape.storages] for _, tape in near), strict=True)),
    )


def _known(written: dict[int, Tape | None]) -> Iterable[tuple[int, Tape]]:
    return ((value, tape) for value, tape in written.items() if tape is not None)


def _last_within(piece: Piece, room: int) -> int | None:
    """The last batch of a piece at which it does not pass ``room``."""
    if piece.at(piece.from_batch) > room:
        return None
    last = MAX_BATCH if piece.to_batch is None else piece.to_batch
    if piece.per_sample_bytes:
        last = min(last, (room - piece.fixed_bytes) // piece.per_sample_bytes)
    return last
