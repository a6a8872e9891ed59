"""Reporters: an estimate in, a string out.

A reporter sees the mapping that ``Estimate.to_dict()`` returns, which is also what
``--format json`` prints, so adding an output touches no other file than :data:`REPORTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from fxmem.errors import UsageError
from fxmem.report import batch, calibration, diff
from fxmem.report.json import JsonReporter
from fxmem.report.markdown import MarkdownReporter
from fxmem.report.sections import Section
from fxmem.report.table import TableReporter

__all__ = [
    "FORMATS",
    "Reporter",
    "render",
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


class Result(Protocol):
    """What the library returns: an :class:`~fxmem.estimate.Estimate` or a ``BatchReport``."""

    def to_dict(self) -> dict[str, object]:
        """Its mapping."""
        ...


def render(result: Result, name: str = TableReporter.name, *, depth: int | None = None) -> str:
    """Write what :func:`fxmem.estimate` or :func:`fxmem.max_batch` returned, as the command line does.

    Args:
        result: The answer.
        name: ``table``, ``json`` or ``markdown``.
        depth: Levels of an estimate's table of modules, ``None`` for none.

    Raises:
        UsageError: No such format.

    >>> import fxmem, torch
    >>> found = fxmem.estimate(torch.nn.Linear(8, 4), lambda batch: torch.zeros(batch, 8), batch=2)
    >>> print(found)
    Linear, inference, batch 2: allocated 32.0 MiB, reserved 34.0 MiB
    >>> print(fxmem.render(found))  # doctest: +ELLIPSIS
    Linear: inference, batch 2, float32
    on h200 (sm_90, no memory limit), torch ...
    """
    if name not in FORMATS:
        raise UsageError(f"there is no format {name!r}", where="render", hint=f"use {', '.join(FORMATS)}")
    report = result.to_dict()
    if "devices" in report:
        return render_batch(report, name)
    return reporter(name, depth=depth).render(report)


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
