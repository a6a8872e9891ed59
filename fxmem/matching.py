"""Lines up two sequences of sizes: the fewest that must be left out of either. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

_MOST = 600
"""Differences up to which the shortest script is searched; beyond, a heuristic pairs what is rare."""
_WINDOW = 20


def matched(a: Sequence[int], b: Sequence[int], most: int = _MOST) -> list[tuple[int, int]]:
    """Pair equal elements in order, as many as can be paired.

    Args:
        a: One sequence.
        b: The other.
        most: Differences up to which the answer is the best one.

    Returns:
        Pairs of indices, ascending in both.

    >>> matched([1, 2, 3], [1, 3, 4])
    [(0, 0), (2, 1)]
    """
    start = 0
    while start < min(len(a), len(b)) and a[start] == b[start]:
        start += 1
    tail = 0
    while tail < min(len(a), len(b)) - start and a[-1 - tail] == b[-1 - tail]:
        tail += 1
    inner_a, inner_b = a[start : len(a) - tail], b[start : len(b) - tail]
    inner = _shortest(inner_a, inner_b, most)
    if inner is None:
        blocks = difflib.SequenceMatcher(None, inner_a, inner_b).get_matching_blocks()
        inner = [(block.a + i, block.b + i) for block in blocks for i in range(block.size)]
    head = [(i, i) for i in range(start)]
    last = [(len(a) - tail + i, len(b) - tail + i) for i in range(tail)]
    return [*head, *((i + start, j + start) for i, j in inner), *last]


def _shortest(a: Sequence[int], b: Sequence[int], most: int) -> list[tuple[int, int]] | None:
    """The greedy algorithm of Myers (1986); ``None`` above ``most`` differences."""
    n, m = len(a), len(b)
    reach = {1: 0}
    history: list[dict[int, int]] = []
    for distance in range(min(most, n + m) + 1):
        history.append(dict(reach))
        for k in range(-distance, distance + 1, 2):
            down = k == -distance or (k != distance and reach[k - 1] < reach[k + 1])
            x = reach[k + 1] if down else reach[k - 1] + 1
            while x < n and x - k < m and a[x] == b[x - k]:
                x += 1
            reach[k] = x
            if x >= n and x - k >= m:
                return _traced(history, n, m)
    return None


def _traced(history: list[dict[int, int]], x: int, y: int) -> list[tuple[int, int]]:
    pairs: list[tuple[int, int]] = []
    for distance in range(len(history) - 1, -1, -1):
        reach, k = history[distance], x - y
        down = k == -distance or (k != distance and reach[k - 1] < reach[k + 1])
        before = (k + 1) if down else (k - 1)
        to_x = reach[before] if distance else 0
        to_y = to_x - before if distance else 0
        while x > to_x and y > to_y:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        if distance:
            x, y = to_x, to_y
    return pairs[::-1]


def slid(
    partner: dict[int, int], left_out: Sequence[int], sizes: Sequence[int], agree: Callable[[int, int, int, int], bool]
) -> dict[int, int]:
    """Among equal neighbours, leave out the one that does not fit.

    Where several equal sizes in a row face one less, any of them may be the one without a partner.

    Args:
        partner: What :func:`matched` gave, from one side to the other.
        left_out: Those of the one side without a partner.
        sizes: Of the one side.
        agree: ``agree(i, j, source, hole)``: whether ``i`` and ``j`` belong together by more than their size, if
            ``source`` has a partner and ``hole`` has none.

    Returns:
        The better partners.

    >>> slid({0: 0}, [1], [8, 8], lambda i, j, source, hole: i == 1)
    {1: 0}
    """
    found = dict(partner)
    for hole in left_out:
        last = first = hole
        while last - hole < _WINDOW and last + 1 in found and sizes[last + 1] == sizes[hole]:
            last += 1
        while hole - first < _WINDOW and first - 1 in found and sizes[first - 1] == sizes[hole]:
            first -= 1
        run = range(first, last + 1)
        partners = [found.pop(i) for i in run if i != hole]

        def fits(other: int, run: range = run, partners: list[int] = partners, hole: int = hole) -> int:
            rest = [i for i in run if i != other]
            return sum(agree(i, j, hole, other) for i, j in zip(rest, partners, strict=True))

        best = max(run, key=lambda other: (fits(other), other == hole))
        found.update(zip([i for i in run if i != best], partners, strict=True))
    return dict(sorted(found.items()))
