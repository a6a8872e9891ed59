"""The estimate on one screen of 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tabulate import tabulate

from fxmem.report.sections import Section, headline, sections

_WIDTH = 100


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
        return "\n\n".join(["\n".join(head), *map(_section, parts)])


def _section(section: Section) -> str:
    return "\n".join([section.title, *_table(section), *(line for text in section.lines for line in _wrap(text))])


def _table(section: Section) -> list[str]:
    if not section.rows:
        return []
    width = max(map(len, (section.header, *section.rows)))
    align = ["right" if column in section.numbers else "left" for column in range(width)]
    text = tabulate(
        section.rows,
        headers=section.header,
        tablefmt="plain",
        disable_numparse=True,
        colalign=align,
        preserve_whitespace=True,
    )
    return [f"  {_cut(line.rstrip())}" for line in text.splitlines()]


def _cut(line: str) -> str:
    room = _WIDTH - 2
    return line if len(line) <= room else line[: room - 3] + "..."


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
