"""The estimate on one screen of 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tabulate import tabulate

from fxmem.report.sections import Row, Section, headline, sections

_WIDTH = 100
_NARROWEST = 30
"""No sentence is broken into lines shorter than this."""
_LEAST_NAME = 12
"""No name is shortened below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableReporter:
    """Plain text for a terminal."""

    name: ClassVar[str] = "table"

    depth: int | None = None
    """Levels of the per-module table; ``None``: no such table."""

    def render(self, report: Mapping[str, Any]) -> str:
        """The header, then the sections, a blank line between them."""
        return self.write(headline(report), sections(report, self.depth))

    def write(self, head: Sequence[str], parts: Sequence[Section]) -> str:
        """Lay out a report of any kind."""
        lines = [line for text in head for line in _broken(text, _WIDTH, "  ")]
        return "\n\n".join(["\n".join(lines), *map(_section, parts)])


def _section(section: Section) -> str:
    lines = [f"  {line}" for text in section.lines for line in _broken(text, _WIDTH - 2, "  ")]
    return "\n".join([section.title, *_table(section), *lines])


def _table(section: Section) -> list[str]:
    if not section.rows:
        return []
    section = _fitted(section)
    width = max(map(len, (section.header, *section.rows)))
    align = ["right" if column in section.numbers else "left" for column in range(width)]
    rows = _narrowed(section)
    text = tabulate(
        [section.header, *rows] if section.header else rows,  # as `headers` tabulate would widen its columns
        tablefmt="plain",
        disable_numparse=True,
        colalign=align,
        preserve_whitespace=True,
    )
    return [f"  {_cut(line.rstrip())}" for line in text.splitlines()]


def _fitted(section: Section) -> Section:
    """Make room for the last column where that is a number: break the titles of numbers, then shorten names."""
    numbers, rows = section.numbers, section.rows
    last = len(section.header) - 1
    if last not in numbers:
        return section
    widest = [max(len(row[column]) for row in rows) for column in range(last + 1)]
    header = section.header
    if _over(widest, header) > 0:
        header = tuple(_title(text, widest[at]) if at in numbers else text for at, text in enumerate(header))
    rooms = dict[int, int]()
    over = _over(widest, header)
    for column in reversed([column for column in range(last) if column not in numbers]):  # the first tells most
        rooms[column] = max(widest[column] - max(over, 0), min(_LEAST_NAME, widest[column]))
        over -= widest[column] - rooms[column]
    short = [tuple(_middle(cell, rooms.get(at, len(cell))) for at, cell in enumerate(row)) for row in rows]
    return section._replace(header=header, rows=tuple(short))


def _over(widest: Sequence[int], header: Row) -> int:
    """By how much a table is too wide."""
    titles = [max(map(len, text.split("\n"))) for text in header]
    return sum(map(max, widest, titles)) + 2 * (len(header) - 1) - (_WIDTH - 2)


def _title(text: str, room: int) -> str:
    return "\n".join(textwrap.wrap(text, room, break_long_words=False))


def _middle(name: str, room: int) -> str:
    """Both ends of a long name: whose part it is, and which one."""
    head = (room - 3) // 2
    return name if len(name) <= room else f"{name[:head]}...{name[head + 3 - room :]}"


def _narrowed(section: Section) -> list[Row]:
    """The rows; a sentence in the last column is broken where its line would be too long."""
    last = max(map(len, (section.header, *section.rows))) - 1
    before = sum(2 + max(len(row[column]) for row in section.rows if column < len(row)) for column in range(last))
    room = max(_WIDTH - 2 - before, _NARROWEST)
    return [(*row[:last], *("\n".join(_broken(cell, room)) for cell in row[last:])) for row in section.rows]


def _broken(text: str, room: int, indent: str = "") -> list[str]:
    """Lines of at most ``room``; ``indent`` stands before all but the first. A bar that fits keeps its blanks."""
    fits = len(text) <= room
    return [text] if fits else textwrap.wrap(text, room, subsequent_indent=indent, break_on_hyphens=False)


def _cut(line: str) -> str:
    room = _WIDTH - 2
    return line if len(line) <= room else line[: room - 3] + "..."
