"""Reporters: an estimate in, a string out.

A reporter sees the mapping that ``Estimate.to_dict()`` returns, which is also what
``--format json`` prints, so adding an output touches no other file than :data:`REPORTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from fxmem.report import batch, calibration, diff
from fxmem.report.json import JsonReporter
from fxmem.report.markdown import MarkdownReporter
from fxmem.report.sections import Section
from fxmem.report.table import TableReporter

__all__ = [
    "FORMATS",
    "Reporter",
    "render_batch",
    "render_calibration",
    "render_diff",
    "render_verification",
    "reporter",
]


class Reporter(Protocol):
    """One output format; its options are its fields."""

    name: ClassVar[str]
    """The spelling on the command line."""

    def render(self, report: Mapping[str, Any]) -> str:
        """Turn an estimate's mapping into the text, without a line break at its end."""
        ...


FORMATS = (TableReporter.name, JsonReporter.name, MarkdownReporter.name)


def reporter(name: str, *, depth: int | None = None) -> Reporter:
    """The reporter of a format.

    Args:
        name: One of :data:`FORMATS`.
        depth: Levels of the per-module table, ``None`` for none. JSON carries every module.

    Raises:
        KeyError: No such format.

    >>> reporter("json").name
    'json'
    """
    makers: dict[str, Reporter] = {
        TableReporter.name: TableReporter(depth=depth),
        JsonReporter.name: JsonReporter(),
        MarkdownReporter.name: MarkdownReporter(depth=depth),
    }
    return makers[name]


def render_batch(report: Mapping[str, Any], name: str) -> str:
    """Write the mapping that ``BatchReport.to_dict()`` returns.

    Args:
        report: The mapping.
        name: One of :data:`FORMATS`.
    """
    return _render(report, name, batch.headline, batch.sections)


def render_diff(report: Mapping[str, Any], name: str) -> str:
    """Write the mapping that ``Comparison.to_dict()`` returns.

    Args:
        report: The mapping.
        name: One of :data:`FORMATS`.
    """
    return _render(report, name, diff.headline, diff.sections)


def render_calibration(receipt: Mapping[str, Any], name: str) -> str:
    """Write a receipt.

    Args:
        receipt: The mapping that is in its file.
        name: One of :data:`FORMATS`.
    """
    return _render(receipt, name, calibration.headline, calibration.sections)


def render_verification(report: Mapping[str, Any], name: str) -> str:
    """Write the mapping that ``Verification.to_dict()`` returns.

    Args:
        report: The mapping.
        name: One of :data:`FORMATS`.
    """
    return _render(report, name, diff.verify_headline, diff.verify_sections)


def _render(
    report: Mapping[str, Any],
    name: str,
    headline: Callable[[Mapping[str, Any]], tuple[str, ...]],
    sections: Callable[[Mapping[str, Any]], tuple[Section, ...]],
) -> str:
    if name == JsonReporter.name:
        return JsonReporter().render(report)
    writer = TableReporter() if name == TableReporter.name else MarkdownReporter()
    return writer.write(headline(report), sections(report))
