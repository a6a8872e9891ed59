"""The two runs of a comparison: births in order, and when each dies. No torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from fxmem.matching import matched, slid


class Side:
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


class Gaps:
    """Says whether deaths fall between the same pairs."""

    def __init__(self, pairs: Sequence[tuple[int, int]], real: Side, ours: Side) -> None:
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


def paired(real: Side, ours: Side, most: int) -> list[tuple[int, int]]:
    """Pair the births of both by size and order; among equal neighbours, by their deaths.

    Args:
        real: The recording.
        ours: The tape.
        most: Differences up to which the answer is the best one.
    """
    pairs = matched(real.sizes, ours.sizes, most)
    partner = dict(pairs)
    left_out = [i for i in range(len(real.sizes)) if i not in partner]
    if len(left_out) > most:
        return pairs
    for hole in left_out:
        partner = slid(partner, [hole], real.sizes, Gaps(list(partner.items()), real, ours).agree_without)
    back = {j: i for i, j in partner.items()}
    for hole in [j for j in range(len(ours.sizes)) if j not in back][:most]:
        gaps = Gaps(sorted((i, j) for j, i in back.items()), real, ours)
        back = slid(back, [hole], ours.sizes, gaps.agree_beside)
    return sorted((i, j) for j, i in back.items())
