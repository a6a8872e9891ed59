"""The shipped answers: convolutions of common models at common batches, and what to infer from them.

``fxmem/data/cudnn_workspaces.json.xz`` is written by ``calibration/cudnn_table.py`` alone. A question
that is in it is answered to 512 bytes, the allocator's granularity. Any other is answered by rule: the
three convolutions of the table that are most like it say which copies cuDNN takes
(:mod:`fxmem.cudnn.sizes`), those copies are counted at the question's own sizes, and the middle of
the three counts.
"""

from __future__ import annotations

import functools
import heapq
import json
import lzma
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from fxmem.cudnn.question import Convolution
from fxmem.cudnn.sizes import COMBINATIONS, Parts, operands

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
RESTS = (0, 16, 131, 147)
"""The rests that most answers have, by the digit that stands for them; the next digit: listed one by one."""

_SCHEMA = 1
_FINE, _BLOCK = 4096, 512
"""A rest of so many bytes or more is written in blocks, rounded up, as a negative number."""

_CHANNELS, _PIXELS, _BATCH, _KERNEL, _STRIDE, _TILE, _GROUPS = 1.0, 0.5, 0.5, 2.0, 2.0, 1.0, 0.5
"""Distances between convolutions: a doubling of each, another stride, another divisibility of the channels.
Set by hand: five other settings moved the summed error on 267 held-out convolutions by less than five points."""

Shape = tuple[tuple[int, ...], ...]
_Place = tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """The answers of one architecture."""

    cudnn: int
    """Version that answered, as ``cudnnGetVersion`` gives it."""
    versions: tuple[float, float]
    """How far other cuDNN versions' answers lie away, as fractions of the operands (90 %)."""
    rule: tuple[float, float]
    """How far answers lie from the rule's, for convolutions that are not in the table (90 %)."""
    batches: tuple[int, ...]
    convolutions: dict[Shape, int]
    answers: dict[str, tuple[Parts | None, ...]]
    """By direction, dtype and layout: for each convolution, for each batch; ``None``: not asked."""

    def find(self, question: Convolution) -> int | None:
        """The exact answer, if the table has it."""
        at = self.convolutions.get(_shape(question))
        if at is None or question.x[0] not in self.batches or not (question.tf32 or question.dtype != "float32"):
            return None
        row = self.answers.get(_row(question))
        found = row[at * len(self.batches) + self.batches.index(question.x[0])] if row else None
        return None if found is None else found.nbytes(operands(question))

    def infer(self, question: Convolution) -> int:
        """The rule's answer; 0 where nothing in the table is like it."""
        place, kind = _place(question), _kind(question)
        row = _row(question)
        known = [candidate for candidate in _candidates(self, row) if candidate[0] == kind]
        nearest = heapq.nsmallest(3, known, key=lambda candidate: _distance(place, candidate[1]))
        sizes = operands(question)
        values = sorted(candidate[2].nbytes(sizes) for candidate in nearest)
        return values[len(values) // 2] if values else 0


@functools.cache
def table(sm: int) -> Table | None:
    """The table of an architecture that is planned for; ``None`` if there is none or it cannot be read."""
    file = resources.files("fxmem").joinpath("data/cudnn_workspaces.json.xz")
    try:
        content = json.loads(lzma.decompress(file.read_bytes()))
    except (OSError, ValueError, lzma.LZMAError):
        return None
    usable = content.get("schema") == _SCHEMA and str(sm) in content["architectures"]
    return read(content, sm) if usable else None


def read(content: dict[str, Any], sm: int) -> Table:
    """Make an architecture's table of the file's content."""
    own = content["architectures"][str(sm)]
    convolutions = {tuple(tuple(part) for part in c): i for i, c in enumerate(content["convolutions"])}
    answers: dict[str, tuple[Parts | None, ...]] = {}
    for row, (copies, rests, listed) in own["answers"].items():
        answers[row] = _decode(copies, rests, listed, answers.get(row.replace("bfloat16", "float16")))
    return Table(
        cudnn=content["cudnn"],
        versions=(own["versions"][0], own["versions"][1]),
        rule=(own["rule"][0], own["rule"][1]),
        batches=tuple(content["batches"]),
        convolutions=convolutions,
        answers=answers,
    )


def encode(row: Sequence[Parts | None], same: Sequence[Parts | None] | None) -> tuple[str, str, list[int]]:
    """Write a row as text: which copies, which rest, and the rests that are listed.

    Args:
        row: The answers.
        same: The answers in float16, for bfloat16: those that are equal are written ``=``.
    """
    copies, rests, listed = [], [], []
    for i, entry in enumerate(row):
        if entry is None or (same is not None and same[i] == entry):
            copies.append("." if entry is None else "=")
            continue
        copies.append(DIGITS[COMBINATIONS.index(entry.copies)])
        common = RESTS.index(entry.rest) if entry.rest in RESTS else len(RESTS)
        rests.append(DIGITS[common])
        if common == len(RESTS):
            listed.append(entry.rest if entry.rest < _FINE else entry.rest // -_BLOCK)
    return "".join(copies), "".join(rests), listed


def _decode(
    copies: str, rests: str, listed: Sequence[int], same: Sequence[Parts | None] | None
) -> tuple[Parts | None, ...]:
    kinds, others = iter(rests), iter(listed)
    row: list[Parts | None] = []
    for i, digit in enumerate(copies):
        if digit in (".", "="):
            row.append(same[i] if digit == "=" and same is not None else None)
            continue
        kind = DIGITS.index(next(kinds))
        rest = RESTS[kind] if kind < len(RESTS) else next(others)
        row.append(Parts(COMBINATIONS[DIGITS.index(digit)], rest if rest >= 0 else -rest * _BLOCK))
    return tuple(row)


def _shape(question: Convolution) -> Shape:
    return (question.x[1:], question.w, question.stride, question.padding, question.dilation)


def _row(question: Convolution) -> str:
    dtype = "float32" if question.dtype == "float64" else question.dtype
    return f"{question.direction} {dtype} {'nhwc' if question.channels_last else 'nchw'}"


def _kind(question: Convolution) -> tuple[bool, bool, bool]:
    """Grouped, depthwise, pointwise: what cuDNN has kernels of its own for."""
    return question.groups > 1, question.groups > 1 and question.w[1] == 1, max(question.w[2:]) == 1


def _place(question: Convolution) -> _Place:
    groups, inner, outer = question.groups, question.w[1], question.w[0] // question.groups
    return (
        _CHANNELS * math.log2(question.x[1]), _CHANNELS * math.log2(question.w[0]),
        _PIXELS * math.log2(math.prod(question.x[2:])), _BATCH * math.log2(question.x[0]),
        _KERNEL * math.log2(math.prod(question.w[2:])), _STRIDE * min(max(question.stride) - 1, 1),
        _TILE * math.gcd(inner, 8) / 8, _TILE * math.gcd(outer, 8) / 8, _GROUPS * math.log2(groups),
    )  # fmt: skip


def _distance(one: _Place, other: _Place) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


@functools.lru_cache(maxsize=128)
def _candidates(of: Table, row: str) -> tuple[tuple[tuple[bool, bool, bool], _Place, Parts], ...]:
    """A row's answers with their places."""
    found = []
    entries = iter(of.answers.get(row, ()))
    for x, w, stride, padding, dilation in of.convolutions:
        for batch in of.batches:
            entry = next(entries, None)
            if entry is not None:
                q = Convolution(x=(batch, *x), w=w, stride=stride, padding=padding, dilation=dilation)
                found.append((_kind(q), _place(q), entry))
    return tuple(found)
