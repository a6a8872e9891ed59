"""The batch law: one traced program, its memory at every batch size.

Tapes of one program at several batch sizes are matched piece by piece. Two of them fix a line
for every integer, the others must lie on it; then the tape at any larger batch is known without
tracing, and the peak of the requested bytes is a convex, piecewise linear function of the batch.
Small batches at which the program differs (batch 1: other broadcasting, other strides) stand for
themselves. Nothing is interpolated that a third tape has not proved.

The law speaks of requested bytes. Rounding, blocks and segments are not affine; they come from
replaying the tape at the batch asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from fxmem.affine import Parts, at_distance, clear_odd_flops, first_difference, put_together, rates, take_apart
from fxmem.liveness import ACTIVATION_ROLES, peak
from fxmem.tape import Role, Tape

_PROOF = 3
"""Tapes on the same lines that it takes: two for a line, one to prove it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The peak of the requested bytes is ``fixed_bytes + per_sample_bytes * batch`` here."""

    from_batch: int
    to_batch: int | None
    """Inclusive; ``None``: no upper end."""
    fixed_bytes: int
    per_sample_bytes: int

    def at(self, batch: int) -> int:
        """Bytes at a batch.

        >>> Piece(from_batch=2, to_batch=None, fixed_bytes=10, per_sample_bytes=3).at(4)
        22
        """
        return self.fixed_bytes + self.per_sample_bytes * batch

    def covers(self, batch: int) -> bool:
        """Whether the batch lies in this piece."""
        return self.from_batch <= batch and (self.to_batch is None or batch <= self.to_batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lines:
    """A tape and how fast each of its integers grows."""

    tape: Tape
    parts: Parts = field(repr=False)
    growth: tuple[int, ...] = field(repr=False)

    @property
    def size_growth(self) -> list[int]:
        """Bytes per sample, for each storage."""
        return [self.growth[mark] for mark in self.parts.marks[: len(self.tape.storages)]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Requested:
    """Requested bytes over time, each allocation on a line."""

    batch: int
    """The smallest batch that the lines hold for."""
    events: tuple[int, ...] = field(repr=False)
    fixed: tuple[int, ...] = field(repr=False)
    """Bytes of each storage at batch 0."""
    growth: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLaw:
    """What is known of a program's tape at each batch. Made by :func:`fit`."""

    exact: bool
    """Whether the law was proved: it then covers every batch from its smallest on."""
    why: str
    """The first difference between the tapes, if not exact or if small batches stand alone."""
    lone: tuple[Tape, ...] = field(default=(), repr=False)
    """Traced batches that stand for themselves, ascending."""
    lines: _Lines | None = field(default=None, repr=False)
    requested: _Requested | None = field(default=None, repr=False)
    """The lines with what kernels take, see :func:`with_kernels`."""
    lone_peaks: tuple[Piece, ...] = field(default=(), repr=False)
    """The points of ``lone`` with what kernels take."""
    needs_proof: bool = False
    """Not exact only because too few tapes match: tracing one more batch may prove the law."""

    def covers(self, batch: int) -> bool:
        """Whether the tape at this batch is known."""
        return self._alone(batch) is not None or (self.lines is not None and batch >= self.lines.tape.batch)

    def sizes(self, batch: int) -> list[int]:
        """Compute the requested bytes of each storage of ``at(batch)``.

        Args:
            batch: Samples.

        Raises:
            ValueError: The law does not cover the batch.
        """
        alone = self._alone(batch)
        if alone is not None:
            return [storage.nbytes for storage in alone.storages]
        lines = self._lines(batch)
        base = [storage.nbytes for storage in lines.tape.storages]
        return at_distance(base, lines.size_growth, batch - lines.tape.batch)

    def at(self, batch: int) -> Tape:
        """Write the full tape at a batch.

        Args:
            batch: Samples.

        Raises:
            ValueError: The law does not cover the batch.
        """
        alone = self._alone(batch)
        if alone is not None:
            return alone
        lines = self._lines(batch)
        return put_together(lines.tape, lines.parts, lines.growth, batch)

    def pieces(self) -> tuple[Piece, ...]:
        """Compute the peak of the requested bytes as a function of the batch.

        Returns:
            Pieces in ascending order, each exact on all its batches; a lone batch is a piece of
            its own with ``per_sample_bytes`` 0.
        """
        alone = self.lone_peaks or tuple(_point(tape) for tape in self.lone)
        if self.lines is None:
            return alone
        requested = self.requested or _plain_lines(self.lines)
        return (*alone, *_envelope(_moments(requested), requested.batch))

    def requested_peak(self, batch: int) -> int:
        """Compute the peak of the requested bytes at a batch.

        Raises:
            ValueError: The law does not cover the batch.
        """
        for piece in self.pieces():
            if piece.covers(batch):
                return piece.at(batch)
        raise ValueError(f"the law does not cover batch {batch}")

    def activation_slope(self, batch: int) -> int | None:
        """Compute how fast the peak of live activations grows at a batch.

        Args:
            batch: Samples.

        Returns:
            Bytes per sample at the moment of that peak; ``None`` where no line is known.
        """
        if self.lines is None or not self.covers(batch) or self._alone(batch) is not None:
            return None
        tape = self.lines.tape
        moment = peak(tape, self.sizes(batch), ACTIVATION_ROLES).event
        counted = [storage.role in ACTIVATION_ROLES for storage in tape.storages]
        growth = self.lines.size_growth
        return sum(
            growth[event] if event >= 0 else -growth[~event]
            for event in tape.events[: moment + 1]
            if counted[event if event >= 0 else ~event]
        )

    def _alone(self, batch: int) -> Tape | None:
        return next((tape for tape in self.lone if tape.batch == batch), None)

    def _lines(self, batch: int) -> _Lines:
        if self.lines is None or not self.covers(batch):
            raise ValueError(f"the law does not cover batch {batch}")
        return self.lines


def fit(tapes: Sequence[Tape]) -> BatchLaw:
    """Find the batch law of a program from its tapes.

    The largest batches that lie on common lines make the law, at least three of them; smaller
    ones stand for themselves.

    Args:
        tapes: The same program traced at different batch sizes, in any order.

    Returns:
        The law. If the largest batches do not match, ``exact`` is false, ``why`` names the first
        difference, and only the traced batches are covered.

    Raises:
        ValueError: No tape, or two of one batch.
    """
    ordered = sorted(tapes, key=lambda tape: tape.batch)
    batches = [tape.batch for tape in ordered]
    if not ordered or len(set(batches)) < len(batches):
        raise ValueError(f"a law needs tapes of different batches, got {batches}")
    parts = [take_apart(tape) for tape in ordered]
    clear_odd_flops(batches, parts, len(ordered[-1].storages))
    growth: tuple[int, ...] | None = None
    start = len(ordered) - 1
    while start > 0:
        wider = _common_growth(batches[start - 1 :], parts[start - 1 :], len(ordered[0].storages))
        if wider is None:
            break
        growth, start = wider, start - 1
    together = len(ordered) - start
    parting = _parting(ordered, start)
    if growth is None or together < _PROOF:
        why = parting or "a law needs traces at three batches or more"
        unproved = growth is not None or len(ordered) == 1
        return BatchLaw(exact=False, why=why, lone=tuple(ordered), needs_proof=unproved)
    notes = tuple(dict.fromkeys(note for tape in ordered[start:] for note in tape.notes))
    lines = _Lines(tape=replace(ordered[start], notes=notes), parts=parts[start], growth=growth)
    return BatchLaw(exact=True, why=parting, lone=tuple(ordered[:start]), lines=lines)


def _common_growth(batches: Sequence[int], parts: Sequence[Parts], storages: int) -> tuple[int, ...] | None:
    """Match tapes: their fixed parts are equal and no storage shrinks as the batch grows."""
    if any(part.fixed != parts[0].fixed for part in parts[1:]):
        return None
    growth = rates(batches, [part.ints for part in parts])
    if growth is None or any(growth[mark] < 0 for mark in parts[0].marks[:storages]):
        return None
    return growth


def _parting(ordered: Sequence[Tape], start: int) -> str:
    """Say why the tape before ``start`` does not belong to those from there on."""
    if start == 0:
        return ""
    return first_difference(ordered[start - 1 :]) or f"a storage shrinks from batch {ordered[start - 1].batch} on"


def _point(tape: Tape) -> Piece:
    nbytes = peak(tape, counted(tape)).nbytes
    return Piece(from_batch=tape.batch, to_batch=tape.batch, fixed_bytes=nbytes, per_sample_bytes=0)


def with_kernels(law: BatchLaw, expanded: Sequence[Tape]) -> BatchLaw:
    """Let the law's pieces count what kernels take beside the tensors: temporaries and kept workspaces.

    Scratch is left out (:func:`counted`), and so is a temporary that only some of the tapes have.

    Args:
        law: Of the tapes as traced.
        expanded: The same tapes after :func:`fxmem.kernels.expand`.

    Returns:
        The law with ``requested`` and ``lone_peaks`` set.
    """
    by_batch = {tape.batch: tape for tape in expanded}
    points = tuple(_point(by_batch[tape.batch]) for tape in law.lone)
    if law.lines is None:
        return replace(law, lone_peaks=points)
    base = law.lines.tape.batch
    lined = [by_batch[b] for b in sorted(by_batch) if b >= base]
    plain = _plain_lines(law.lines)
    taken = [_taken(tape, len(plain.fixed)) for tape in lined]
    fixed, growth = list(plain.fixed), list(plain.growth)
    scratch = _scratch(lined[0])
    for key, storage in taken[0].items():
        sizes = [
            tape.storages[found[key]].nbytes if key in found else None for tape, found in zip(lined, taken, strict=True)
        ]
        rate = None if storage in scratch else _line([tape.batch for tape in lined], sizes)
        fixed.append(0 if rate is None else lined[0].storages[storage].nbytes - rate * base)
        growth.append(rate or 0)
    requested = _Requested(batch=base, events=lined[0].events, fixed=tuple(fixed), growth=tuple(growth))
    return replace(law, requested=requested, lone_peaks=points)


def counted(tape: Tape) -> list[int]:
    """Requested bytes of each storage as the law counts them.

    Workspaces that a call takes and gives back follow the launch, not the batch: they count 0 here.
    Workspaces that are kept for ever (cuBLAS) are constant and count in full.
    """
    scratch = _scratch(tape)
    return [0 if i in scratch else storage.nbytes for i, storage in enumerate(tape.storages)]


def _scratch(tape: Tape) -> set[int]:
    freed = {~event for event in tape.events if event < 0}
    return {i for i in freed if tape.storages[i].role is Role.WORKSPACE}


def _taken(tape: Tape, traced: int) -> dict[tuple[int, str, int], int]:
    """What kernels take, in order: (operator, name, how many of that name before) to storage."""
    seen: Counter[tuple[int | None, str]] = Counter()
    found = {}
    for index, storage in enumerate(tape.storages[traced:], traced):
        name = (storage.op, storage.name)
        found[(storage.op or 0, storage.name, seen[name])] = index
        seen[name] += 1
    return found


def _line(batches: Sequence[int], sizes: Sequence[int | None]) -> int | None:
    """The rate at which a size grows, ``None`` if it is not on a line."""
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return None
    rate, rest = divmod(known[1] - known[0], batches[1] - batches[0])
    on_line = all(size == known[0] + rate * (b - batches[0]) for b, size in zip(batches, known, strict=True))
    return rate if rest == 0 and on_line and rate >= 0 else None


def _plain_lines(lines: _Lines) -> _Requested:
    growth = lines.size_growth
    fixed = [s.nbytes - rate * lines.tape.batch for s, rate in zip(lines.tape.storages, growth, strict=True)]
    return _Requested(batch=lines.tape.batch, events=lines.tape.events, fixed=tuple(fixed), growth=tuple(growth))


def _moments(requested: _Requested) -> Iterable[tuple[int, int]]:
    """Yield the live bytes after each event as (bytes per sample, bytes at batch 0)."""
    growth, base, events = requested.growth, requested.fixed, requested.events
    slopes = accumulate(growth[event] if event >= 0 else -growth[~event] for event in events)
    return zip(slopes, accumulate(base[event] if event >= 0 else -base[~event] for event in events), strict=True)


def _envelope(moments: Iterable[tuple[int, int]], first: int) -> tuple[Piece, ...]:
    """Take the maximum of lines over all whole batches from ``first`` on."""
    highest: dict[int, int] = {0: 0}
    for slope, height in moments:
        if height > highest.get(slope, height - 1):
            highest[slope] = height
    hull: list[tuple[int, int]] = []
    for slope, height in sorted(highest.items()):
        while len(hull) > 1 and _hidden(hull[-2], hull[-1], (slope, height)):
            hull.pop()
        hull.append((slope, height))
    # A line takes over at the first whole batch at which it is not below the flatter one.
    begins = [first] + [-((high - low) // (steep - flat)) for (flat, low), (steep, high) in pairwise(hull)]
    pieces: list[Piece] = []
    for index, (slope, height) in enumerate(hull):
        begin = max(first, begins[index])
        end = begins[index + 1] - 1 if index + 1 < len(hull) else None
        if end is None or begin <= end:
            pieces.append(Piece(from_batch=begin, to_batch=end, fixed_bytes=height, per_sample_bytes=slope))
    return tuple(pieces)


def _hidden(left: tuple[int, int], middle: tuple[int, int], right: tuple[int, int]) -> bool:
    """Whether the line between two of smaller and larger slope is nowhere above both."""
    reach = (left[1] - right[1]) * (middle[0] - left[0])
    return reach <= (left[1] - middle[1]) * (right[0] - left[0])
