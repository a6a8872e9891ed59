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
    width = max(map(len, (section.header, *section.rows)))
    align = ["right" if column in section.numbers else "left" for column in range(width)]
    text = tabulate(
        _narrowed(section),
        headers=section.header,
        tablefmt="plain",
        disable_numparse=True,
        colalign=align,
        preserve_whitespace=True,
    )
    return [f"  {_cut(line.rstrip())}" for line in text.splitlines()]


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
