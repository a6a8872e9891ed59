"""The whole tapes of a program at any batch, or along another axis: written by a law, or traced.

"Whole": all steps of the workload and what kernels take. Each is made once and kept. Between tapes with
the same events the sizes can be interpolated, which is how a search gets close without writing more.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Protocol

from fxmem.demand import DemandLaw, demand_law
from fxmem.errors import FxmemError, UsageError
from fxmem.kernels import Target, expand
from fxmem.law import BatchLaw, Piece
from fxmem.liveness import collector_paused
from fxmem.steady import extend
from fxmem.tape import Demand, Tape

MAX_BATCH = 2**24
"""Where a search ends: memory that does not limit the batch here does not limit it."""
MAX_TRACES = 24
"""Enough to come near from afar and halve a bracket; curves that fit take five."""
MAX_SECONDS = 300.0
"""No trace begins when so much was spent on tracing."""
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
    failed: dict[int, FxmemError]
    """Those among them at which the program does not run."""
    why: str
    """Why they had to be."""
    calibrated: bool
    """Whether a guess is likely to be right."""

    @property
    def known(self) -> Sequence[int]:
        """Values whose tapes are there because they were traced, for nothing more."""

    def at(self, value: int, /) -> Tape | None:
        """The whole tape; ``None``: it does not run (``failed``), or no more may be traced."""

    def demand(self, value: int, /) -> Demand | None:
        """What the whole tape asks of the allocator; ``None`` as for :meth:`at`."""

    def around(self, value: int, event: int, /) -> Tape | None:
        """The whole tape, of which only what is live after an event has to be right."""

    def line(self, value: int, /) -> Line | None:
        """Curves that hold near a value; ``None`` where the known tapes differ."""

    def guess(self, room: int, /) -> int:
        """The value to begin with."""

    def learn(self, fits: int, fails: int, room: int, /) -> None:
        """Keep an answer, for further guesses."""


class _Tracer:
    """Traces values within limits, and keeps why some do not run."""

    def __init__(self, trace: Callable[[int], Tape], limit: int, seconds: float) -> None:
        self.traced: list[int] = []
        self.failed: dict[int, FxmemError] = {}
        self._trace, self._limit, self._left = trace, limit, seconds

    def at(self, value: int) -> Tape | None:
        """The tape; ``None``: the limits are reached, or the program does not run."""
        if value in self.failed or len(self.traced) >= self._limit or self._left <= 0:
            return None
        self.traced.append(value)
        began = time.perf_counter()
        try:
            return self._trace(value)
        except UsageError:
            raise  # wrong at every value
        except FxmemError as error:
            self.failed[value] = error
            return None
        finally:
            self._left -= time.perf_counter() - began


def _untraced(value: int) -> Tape:
    raise AssertionError(f"nothing traces {value}")


class Tapes:
    """A program along its batch.

    Args:
        law: What is known of it.
        steps: Steps of its loop.
        target: The GPU whose kernels run.
        trace: Traces a batch that the law does not cover, all steps of it.
        limit: How often ``trace`` may be called.
        seconds: After which it is not called again.
        start: The batch to begin with where there is no law.
    """

    axis = "batch"
    first = 1
    last = MAX_BATCH

    def __init__(
        self, law: BatchLaw, steps: int, target: Target, trace: Callable[[int], Tape] | None = None,
        limit: int = MAX_TRACES, seconds: float = MAX_SECONDS, start: int = 1,
    ) -> None:  # fmt: skip
        self.law = law
        self._tracer = _Tracer(trace or _untraced, limit if trace else 0, seconds)
        self.traced, self.failed = self._tracer.traced, self._tracer.failed
        self.calibrated = False
        self.why = "" if law.exact else f"no batch law ({law.why})"
        self._steps = steps
        self._target = target
        self._start = start
        self._known: dict[int, Demand] = {}
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
    def known(self) -> Sequence[int]:
        """Where there is no law: batches that were traced, to look for one or since."""
        if self.law.lines is not None:
            return ()
        alone = [tape.batch for tape in self.law.lone if tape.batch in self._traced or extend(tape, self._steps)]
        return sorted({*alone, *self._traced})

    def at(self, batch: int) -> Tape | None:
        """The tape at a batch with all steps and kernels; ``None``: it does not run, or no more may be traced."""
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
        """The line through the two tapes nearest to a batch, without a law the parabola through three."""
        if self.law.lines is None:
            return _curve(self._known, batch, 3)
        below = max(batch - max(batch // _STRIDE, 1), 1)
        if len(self._known) < 2 and self._on_lines(below):
            self.demand(below)
        return _curve(self._known, batch, 2)

    def guess(self, room: int) -> int:
        """The largest batch whose requested bytes, with what the allocator wasted nearby, do not pass the limit."""
        if self.law.lines is None:
            return self._start
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

    def _guess(self, room: int) -> int:
        return max((batch for piece in self._pieces if (batch := _last_within(piece, room))), default=1)

    def _on_lines(self, batch: int) -> bool:
        lines = self.law.lines
        return lines is not None and batch >= lines.tape.batch

    def _alone(self, batch: int) -> Tape | None:
        """A batch beside the lines: known from the law, or traced."""
        if batch not in self._traced:
            tape = extend(self.law.at(batch), self._steps) if self.law.covers(batch) else None
            tape = tape or self._tracer.at(batch)
            if tape is None:
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
        trace: Traces a value, all steps of it.
        limit: How often ``trace`` may be called.
        seconds: After which it is not called again.
    """

    def __init__(
        self, axis: str, values: tuple[int, int], target: Target, trace: Callable[[int], Tape],
        limit: int = MAX_TRACES, seconds: float = MAX_SECONDS,
    ) -> None:  # fmt: skip
        self.axis = axis
        self.first, self.last = values
        self._tracer = _Tracer(trace, limit, seconds)
        self.traced, self.failed = self._tracer.traced, self._tracer.failed
        self.calibrated = False
        self.why = f"memory is a polynomial of {axis}, found from traces and proved by one"
        self._target = target
        self._written: dict[int, Tape] = {}

    @property
    def known(self) -> Sequence[int]:
        """Values that were traced."""
        return sorted(self._written)

    def at(self, value: int) -> Tape | None:
        """The whole tape at a value; ``None``: it does not run, or no more may be traced."""
        if value not in self._written:
            tape = self._tracer.at(value)
            if tape is None:
                return None
            self._written[value] = expand(tape, self._target)
        return self._written[value]

    def line(self, value: int) -> Line | None:
        """Parabolas through three tapes; ``None`` until there are so many with the same events."""
        return _curve({at: tape.demand for at, tape in self._written.items()}, value, 3)

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
