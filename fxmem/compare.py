"""Lines up what a real run allocated with what the tape says, and names the differences. No torch.

Both are sequences of births and deaths. Births are paired by their requested bytes, in order; then each
pair's death is compared: it lies between the same births in both, or it does not. Frees in a row commute.
A recording may begin before the model is moved to the device, or at a step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxmem.estimate import mapping
from fxmem.matching import matched, slid
from fxmem.snapshot import Recorded, Recording
from fxmem.steady import extend
from fxmem.tape import Role, Storage, Tape

_POINTS = 24
_MOST_STEPS = 100
_MOST_SLID = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Allocations that one side has and the other has not, or that live differently, of one size and place."""

    count: int
    nbytes: int
    """Requested bytes of one."""
    line: str
    """The user's line, as far as it is known."""
    what: str
    """Operator, library or role."""
    peak_bytes: int
    """What they hold together at the peak of the side that has them (for lifetimes: the recording)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """The first difference, one sentence a side."""

    after: str
    """The last thing that both did."""
    recorded: str
    predicted: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A moment of both curves, requested bytes."""

    event: int
    """Births since the start, in the recording."""
    recorded_bytes: int
    predicted_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The recording beside the tape."""

    same: bool
    start: str
    """Where on the tape the recording begins."""
    compared: int
    """Pairs of allocations."""
    recorded: int
    predicted: int
    recorded_peak_bytes: int
    """Requested bytes."""
    predicted_peak_bytes: int
    recorded_reserved_bytes: int
    before_recorded_bytes: int
    """What was allocated when the recording began."""
    before_predicted_bytes: int
    first: First | None
    extra: tuple[Group, ...]
    missing: tuple[Group, ...]
    longer: tuple[Group, ...]
    shorter: tuple[Group, ...]
    curve: tuple[Point, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self, target: str, recording: str) -> dict[str, object]:
        """The JSON object of ``fxmem diff --format json``.

        Args:
            target: What was traced.
            recording: The snapshot's file.
        """
        return {"schema": 1, "target": target, "recording": recording, **mapping(self)}


class _Side:
    """One run from its start on: births in order, and for each the number of births before its death."""

    def __init__(self, sizes: Sequence[int], events: Sequence[int], before: Sequence[int]) -> None:
        """Take events over allocations with these sizes; ``before`` are those alive at the start."""
        self.numbers = [e for e in events if e >= 0 and sizes[e]]
        self.sizes = [sizes[e] for e in self.numbers]
        births, dies = 0, dict[int, int]()
        for e in events:
            if e >= 0:
                births += sizes[e] > 0
            else:
                dies[~e] = births
        self.dies = [dies.get(number) for number in self.numbers]
        self.before = sorted((sizes[i], dies.get(i, len(self.numbers) + 1)) for i in before if sizes[i])
        self.before_bytes = sum(nbytes for nbytes, _ in self.before)
        self.curve = self._curve()

    def _curve(self) -> list[int]:
        """Requested bytes alive right after each birth."""
        change = [0] * (len(self.numbers) + 2)
        for at, (nbytes, dies) in enumerate(zip(self.sizes, self.dies, strict=True)):
            change[at] += nbytes
            if dies is not None:
                change[dies] -= nbytes
        for nbytes, dies in self.before:
            change[dies] -= nbytes
        total, curve = self.before_bytes, []
        for at in range(len(self.numbers)):
            total += change[at]
            curve.append(total)
        return curve

    @property
    def peak(self) -> tuple[int, int]:
        """Bytes, and the birth at which they are reached."""
        if not self.curve:
            return self.before_bytes, 0
        top = max(self.curve)
        return top, self.curve.index(top)

    def alive(self, at: int) -> bool:
        """Whether a birth is alive at this side's peak."""
        moment, dies = self.peak[1], self.dies[at]
        return at <= moment and (dies is None or dies > moment)


def compare(tape: Tape, recording: Recording) -> Comparison:
    """Compare a recording with the tape.

    Args:
        tape: Of the same workload, with what kernels take (``fxmem.trace``).
        recording: Of the run.

    Returns:
        What differs; where the recording has more steps than the tape, the tape's last step is repeated.
    """
    sizes = [allocation.nbytes for allocation in recording.allocations]
    real = _Side(sizes, recording.events, range(recording.before))
    tape, start, where = _aligned(tape, real)
    ours = _Side([s.nbytes for s in tape.storages], tape.events[start:], _alive(tape.events[:start]))
    pairs = _settled(matched(real.sizes, ours.sizes), real, ours)
    return _Report(tape, recording, real, ours, pairs, where).made()


class _Gaps:
    """Says whether deaths fall between the same pairs."""

    def __init__(self, pairs: Sequence[tuple[int, int]], real: _Side, ours: _Side) -> None:
        self._real, self._ours = real, ours
        self._a, self._b = [i for i, _ in pairs], [j for _, j in pairs]

    def real(self, dies: int | None) -> int | None:
        """Pairs born before this death in the recording; ``None``: no death."""
        return None if dies is None else bisect_left(self._a, dies)

    def ours(self, dies: int | None) -> int | None:
        """The same on the tape."""
        return None if dies is None else bisect_left(self._b, dies)

    def agree(self, i: int, j: int) -> bool:
        """Whether a pair dies at the same moment."""
        return self.real(self._real.dies[i]) == self.ours(self._ours.dies[j])

    def agree_without(self, i: int, j: int, source: int, hole: int) -> bool:
        """The same if ``source`` of the recording had a partner, and ``hole`` had none."""
        return _shifted(self.real(self._real.dies[i]), self._real.dies[i], source, hole) == self.ours(
            self._ours.dies[j]
        )

    def agree_beside(self, j: int, i: int, source: int, hole: int) -> bool:
        """The same for the tape's side."""
        return _shifted(self.ours(self._ours.dies[j]), self._ours.dies[j], source, hole) == self.real(
            self._real.dies[i]
        )


def _shifted(gap: int | None, dies: int | None, source: int, hole: int) -> int | None:
    return None if gap is None or dies is None else gap + (source < dies) - (hole < dies)


def _settled(pairs: list[tuple[int, int]], real: _Side, ours: _Side) -> list[tuple[int, int]]:
    """Choose among equal neighbours by their deaths."""
    partner = dict(pairs)
    left_out = [i for i in range(len(real.sizes)) if i not in partner]
    if len(left_out) > _MOST_SLID:
        return pairs
    for hole in left_out:
        partner = slid(partner, [hole], real.sizes, _Gaps(list(partner.items()), real, ours).agree_without)
    back = {j: i for i, j in partner.items()}
    for hole in [j for j in range(len(ours.sizes)) if j not in back][:_MOST_SLID]:
        gaps = _Gaps(sorted((i, j) for j, i in back.items()), real, ours)
        back = slid(back, [hole], ours.sizes, gaps.agree_beside)
    return sorted((i, j) for j, i in back.items())


def _aligned(tape: Tape, real: _Side) -> tuple[Tape, int, str]:
    """The tape, long enough; the event at which the recording begins; that moment's name."""
    names = {0: "the model's move to the device"}
    made = [e for e in tape.events[: tape.step_starts[0]] if e >= 0 and tape.storages[e].role is Role.INPUT]
    if made:
        names[tape.events.index(made[0])] = "the making of the inputs"
    names.update({event: f"step {step}" for step, event in enumerate(tape.step_starts, 1)})
    counts = {event: sum(e >= 0 and tape.storages[e].nbytes > 0 for e in tape.events[event:]) for event in names}
    common = {event: _common(real.sizes, tape, event) for event in names}
    best = max(common.values())
    # Steps that repeat begin alike: then the one from which on the tape is as long as the recording.
    close = [event for event in names if common[event] >= best * 0.9]
    start = min(close, key=lambda event: (abs(counts[event] - len(real.sizes)), -common[event]))
    last = len([e for e in tape.events[tape.step_starts[-1] :] if e >= 0 and tape.storages[e].nbytes > 0])
    lacking = len(real.sizes) - counts[start]
    if last and tape.steps > 1 and lacking >= last:
        more = min(round(lacking / last), _MOST_STEPS)
        tape = extend(tape, tape.steps + more) or tape
    return tape, start, names[start]


def _common(sizes: Sequence[int], tape: Tape, start: int) -> int:
    """Births that agree from the start on, one by one."""
    count = 0
    for event in tape.events[start:]:
        if event >= 0 and tape.storages[event].nbytes:
            if count == len(sizes) or sizes[count] != tape.storages[event].nbytes:
                return count
            count += 1
    return count


def _alive(events: Iterable[int]) -> list[int]:
    alive: set[int] = set()
    for event in events:
        if event >= 0:
            alive.add(event)
        else:
            alive.discard(~event)
    return sorted(alive)


class _Report:
    """Gathers the differences; never leaves :func:`compare`."""

    def __init__(
        self, tape: Tape, recording: Recording, real: _Side, ours: _Side, pairs: Sequence[tuple[int, int]], start: str
    ) -> None:
        self.tape, self.recording, self.real, self.ours, self.pairs, self.start = (
            tape, recording, real, ours, pairs, start,
        )  # fmt: skip
        self.gaps = _Gaps(pairs, real, ours)
        partners = dict(pairs)
        met = set(partners.values())
        self.extra = [i for i in range(len(real.sizes)) if i not in partners]
        self.missing = [j for j in range(len(ours.sizes)) if j not in met]
        self.moved = [(i, j) for i, j in pairs if not self.gaps.agree(i, j)]

    def made(self) -> Comparison:
        real, ours = self.real, self.ours
        before = _same_before(self.gaps, real, ours)
        late = {i for i, j in self.moved if self._later(i, j)}
        early = {i for i, _ in self.moved} - late
        return Comparison(
            same=not (self.extra or self.missing or self.moved) and before,
            start=self.start, compared=len(self.pairs), recorded=len(real.sizes), predicted=len(ours.sizes),
            recorded_peak_bytes=real.peak[0], predicted_peak_bytes=ours.peak[0],
            recorded_reserved_bytes=self.recording.peak_reserved_bytes,
            before_recorded_bytes=real.before_bytes, before_predicted_bytes=ours.before_bytes,
            first=self._first(), extra=self._groups(self.extra), missing=self._lacking(),
            longer=self._groups(sorted(late)), shorter=self._groups(sorted(early)), curve=self._curve(),
            notes=self.recording.notes + self._notes(before),
        )  # fmt: skip

    def _later(self, i: int, j: int) -> bool:
        real, ours = self.gaps.real(self.real.dies[i]), self.gaps.ours(self.ours.dies[j])
        return real is None or (ours is not None and real > ours)

    def _notes(self, before: bool) -> tuple[str, ...]:
        notes = []
        if not before:
            notes.append("what was alive when the recording began differs, or is freed at other moments")
        if self.real.numbers and not any(self._recorded(i).stack for i in range(len(self.real.numbers))):
            notes.append("the recording has no Python stacks: record with stacks='all' or stacks='python'")
        return tuple(notes)

    # -------------------------------------------------------------- the two sides' words
    def _recorded(self, i: int) -> Recorded:
        return self.recording.allocations[self.real.numbers[i]]

    def _predicted(self, j: int) -> Storage:
        return self.tape.storages[self.ours.numbers[j]]

    def _said(self, i: int) -> str:
        what = self._recorded(i)
        return " ".join(filter(None, [f"{what.nbytes} bytes", what.library, what.line and f"at {what.line}"]))

    def _told(self, j: int) -> str:
        storage = self._predicted(j)
        source = self._source(storage)
        place = f"at {source}" if source else f"in {storage.module}" if storage.module else ""
        return " ".join(filter(None, [f"{storage.nbytes} bytes", _kind(storage, self.tape), place]))

    def _source(self, storage: Storage) -> str:
        return "" if storage.op is None else self.tape.ops[storage.op].source

    # -------------------------------------------------------------- differences
    def _first(self) -> First | None:
        """The earliest of: a birth that one side lacks, a death that falls elsewhere."""
        found: list[tuple[int, str, str]] = []
        if self.extra or self.missing:
            i, j = self._parting()
            said = self._said(i) if i < len(self.real.sizes) else "the recording ends"
            told = self._told(j) if j < len(self.ours.sizes) else "the tape ends"
            found.append((_shared(self.pairs, i, j), said, told))
        for i, j in self.moved:
            here, there = self.gaps.real(self.real.dies[i]), self.gaps.ours(self.ours.dies[j])
            lives = "lives on" if self._later(i, j) else "is freed"
            other = "is freed" if self._later(i, j) else "lives on"
            at = min(gap for gap in (here, there) if gap is not None)
            found.append((at, f"{self._said(i)} {lives}", f"{self._told(j)} {other}"))
        if not found:
            return None
        count, recorded, predicted = min(found, key=lambda item: item[0])
        after = self._said(self.pairs[count - 1][0]) if count else "the start"
        return First(after=after, recorded=recorded, predicted=predicted)

    def _parting(self) -> tuple[int, int]:
        """The first birth on each side that has no partner there, or what faces it."""
        for count, (i, j) in enumerate(self.pairs):
            if (i, j) != (count, count):
                return count, count
        return len(self.pairs), len(self.pairs)

    def _groups(self, births: Sequence[int]) -> tuple[Group, ...]:
        made = [(self._recorded(i), self.real.alive(i)) for i in births]
        return _grouped([((what.nbytes, what.line, what.library), alive) for what, alive in made])

    def _lacking(self) -> tuple[Group, ...]:
        made = [(self._predicted(j), self.ours.alive(j)) for j in self.missing]
        return _grouped([
            ((what.nbytes, self._source(what) or what.module, _kind(what, self.tape)), alive) for what, alive in made
        ])  # fmt: skip

    def _curve(self) -> tuple[Point, ...]:
        """Both curves at the same pairs; the highest of each stretch."""
        if not self.pairs:
            return ()
        width = max(-(-len(self.pairs) // _POINTS), 1)
        points = []
        for at in range(0, len(self.pairs), width):
            stop = min(at + width, len(self.pairs)) - 1
            (i, j), (i_end, j_end) = self.pairs[at], self.pairs[stop]
            top, other = max(self.real.curve[i : i_end + 1]), max(self.ours.curve[j : j_end + 1])
            points.append(Point(event=i, recorded_bytes=top, predicted_bytes=other))
        return tuple(points)


def _grouped(found: Sequence[tuple[tuple[int, str, str], bool]]) -> tuple[Group, ...]:
    counts = Counter(key for key, _ in found)
    held = Counter(key for key, alive in found if alive)
    groups = [
        Group(count=count, nbytes=key[0], line=key[1], what=key[2], peak_bytes=held[key] * key[0])
        for key, count in counts.items()
    ]
    return tuple(sorted(groups, key=lambda group: (-group.peak_bytes, -group.nbytes * group.count)))


def _shared(pairs: Sequence[tuple[int, int]], i: int, j: int) -> int:
    """Pairs that lie before both."""
    return sum(1 for a, b in pairs if a < i and b < j)


def _kind(storage: Storage, tape: Tape) -> str:
    if storage.role is Role.WORKSPACE:
        return f"{storage.name or 'library'} workspace"
    name = "" if storage.op is None else tape.ops[storage.op].name
    return f"{name} ({storage.role})" if name else f"{storage.role} {storage.name}".strip()


def _same_before(gaps: _Gaps, real: _Side, ours: _Side) -> bool:
    """Whether the same sizes were alive at the start, and die at the same moments."""
    mine = sorted((nbytes, gaps.real(dies) if dies <= len(real.numbers) else -1) for nbytes, dies in real.before)
    other = sorted((nbytes, gaps.ours(dies) if dies <= len(ours.numbers) else -1) for nbytes, dies in ours.before)
    return mine == other
