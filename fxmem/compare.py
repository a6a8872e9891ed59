"""Lines up what a real run allocated with what the tape says, and names the differences. No torch.

Both are sequences of births and deaths. Births are paired by their requested bytes, in order; then each
pair's death is compared: it lies between the same births in both, or it does not. Frees in a row commute.
A recording may begin before the model is moved to the device, or at a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fxmem.estimate import mapping
from fxmem.sides import Gaps, Side, paired
from fxmem.snapshot import Recorded, Recording
from fxmem.steady import extend
from fxmem.tape import Role, Storage, Tape

_POINTS = 24
_MOST_STEPS = 100


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


def compare(tape: Tape, recording: Recording, *, from_step: int | None = None, most: int = 600) -> Comparison:
    """Compare a recording with the tape.

    Args:
        tape: Of the same workload, with what kernels take (``fxmem.trace``).
        recording: Of the run.
        from_step: The step at whose start the recording begins; ``None``: it is found.
        most: Differences up to which allocations are paired in the best way.

    Returns:
        What differs; where the recording has more steps than the tape, the tape's last step is repeated.
    """
    sizes = [allocation.nbytes for allocation in recording.allocations]
    real = Side(sizes, recording.events, range(recording.before))
    if from_step is None:
        tape, start, where = _aligned(tape, real)
    else:
        start, where = tape.step_starts[from_step - 1], f"step {from_step}"
    ours = Side([s.nbytes for s in tape.storages], tape.events[start:], _alive(tape.events[:start]))
    pairs = paired(real, ours, most)
    return _Report(tape, recording, real, ours, pairs, where).made()


def _aligned(tape: Tape, real: Side) -> tuple[Tape, int, str]:
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
        self, tape: Tape, recording: Recording, real: Side, ours: Side, pairs: Sequence[tuple[int, int]], start: str
    ) -> None:
        self.tape, self.recording, self.real, self.ours, self.pairs, self.start = (
            tape, recording, real, ours, pairs, start,
        )  # fmt: skip
        self.gaps = Gaps(pairs, real, ours)
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


def _same_before(gaps: Gaps, real: Side, ours: Side) -> bool:
    """Whether the same sizes were alive at the start, and die at the same moments."""
    mine = sorted((nbytes, gaps.real(dies) if dies <= len(real.numbers) else -1) for nbytes, dies in real.before)
    other = sorted((nbytes, gaps.ours(dies) if dies <= len(ours.numbers) else -1) for nbytes, dies in ours.before)
    return mine == other
