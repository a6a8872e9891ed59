"""The estimate as Markdown, for pull requests and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tabulate import tabulate

from fxmem.report.sections import Section, headline, sections


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkdownReporter:
    """The same sections as the table, as headings and pipe tables."""

    name: ClassVar[str] = "markdown"

    depth: int | None = None
    """Levels of the per-module table; ``None``: no such table."""

    def render(self, report: Mapping[str, Any]) -> str:
        """Headings of the second level, so that the text fits under another title."""
        return self.write(headline(report), sections(report, self.depth))

    def write(self, head: Sequence[str], parts: Sequence[Section]) -> str:
        """Lay out a report of any kind."""
        what, *about = map(_escape, head)
        return "\n\n".join([f"## {what}", "  \n".join(about), *map(_section, parts)])


def _section(section: Section) -> str:
    parts = [f"### {section.title}"]
    if section.rows:
        header = section.header or ("",) * max(map(len, section.rows))
        rows = [[_escape(cell) for cell in row] for row in section.rows]
        align = ["right" if column in section.numbers else "left" for column in range(len(header))]
        parts.append(tabulate(rows, headers=header, tablefmt="pipe", disable_numparse=True, colalign=align))
    if section.lines:
        parts.append("\n".join(f"- {_escape(line)}" for line in section.lines))
    return "\n\n".join(parts)


def _escape(cell: str) -> str:
    for sign in "\\|*_<`":
        cell = cell.replace(sign, "\\" + sign)
    return cell
