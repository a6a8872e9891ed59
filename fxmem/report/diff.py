"""The answer of ``fxmem diff`` for a person: the same or not, where it begins, and what there is too much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fxmem.report.sections import Row, Section
from fxmem.units import format_size

_BAR = 40
_SHOWN = 12
_LISTS = (
    ("extra", "Only in the recording", "at its peak"),
    ("missing", "Only on the tape", "at its peak"),
    ("longer", "Lives longer in the recording", "at its peak"),
    ("shorter", "Dies earlier in the recording", "at its peak"),
)


def headline(report: Mapping[str, Any]) -> tuple[str, ...]:
    """What was compared, and the answer."""
    answer = "no difference" if report["same"] else "they differ"
    counts = f"the recording has {report['recorded']} from {report['start']} on, the tape {report['predicted']}"
    return (
        f"{report['target']} beside {report['recording']}: {answer}",
        f"{report['compared']} allocations agree; {counts}",
    )


def sections(report: Mapping[str, Any]) -> tuple[Section, ...]:
    """Figures, the first difference, the lists, the curves."""
    parts = [Section("Requested bytes", _figures(report), ("", "recording", "tape", "difference"), (1, 2, 3))]
    if report["first"] is not None:
        first = report["first"]
        rows = (("after", first["after"]), ("recording", first["recorded"]), ("tape", first["predicted"]))
        parts.append(Section("First difference", rows))
    parts += _lists(report)
    if report["curve"]:
        legend = "= both, r only the recording, t only the tape; the highest of each stretch of allocations"
        parts.append(Section("Both curves", _curves(report["curve"]), numbers=(0, 1, 2), lines=(legend,)))
    if report["notes"]:
        parts.append(Section("Notes", lines=tuple(report["notes"])))
    return tuple(parts)


def verify_headline(report: Mapping[str, Any]) -> tuple[str, ...]:
    """The answer of ``fxmem verify``."""
    answer = "the tape is what ran" if report["same"] else "the tape is not what ran"
    left_out = f"{report['inside_kernels']} inside kernels and {report['numbers']} single numbers"
    return (
        f"{report['target']} on the CPU: {answer}",
        f"{report['compared']} of the tape's {report['predicted']} allocations were made in its order",
        f"left out of the real run: {left_out}",
    )


def verify_sections(report: Mapping[str, Any]) -> tuple[Section, ...]:
    """What does not agree."""
    parts = _lists(report)
    if report.get("unmodelled"):
        parts.append(Section("The tape leaves out, and the real run did not", lines=tuple(report["unmodelled"])))
    return tuple(parts)


def _lists(report: Mapping[str, Any]) -> list[Section]:
    parts = []
    for key, title, peak in _LISTS:
        if report.get(key):
            more = len(report[key]) - _SHOWN
            lines = (f"and {more} more",) if more > 0 else ()
            header = ("size", "times", peak, "where", "what")
            parts.append(Section(title, _groups(report[key][:_SHOWN]), header, (0, 1, 2), lines))
    return parts


def _figures(report: Mapping[str, Any]) -> tuple[Row, ...]:
    rows = []
    for label, key in (("when it begins", "before"), ("peak", "peak")):
        names = ("recorded_peak_bytes", "predicted_peak_bytes")
        if key == "before":
            names = ("before_recorded_bytes", "before_predicted_bytes")
        recorded, predicted = (report[name] for name in names)
        difference = (
            "0 B"
            if recorded == predicted
            else f"{'+' if recorded > predicted else '-'}" + format_size(abs(recorded - predicted))
        )
        rows.append((label, format_size(recorded), format_size(predicted), difference))
    rows.append(("reserved", format_size(report["recorded_reserved_bytes"]), "", ""))
    return tuple(rows)


def _groups(groups: Sequence[Mapping[str, Any]]) -> tuple[Row, ...]:
    return tuple(
        (format_size(group["nbytes"]), str(group["count"]), format_size(group["peak_bytes"]),
         _tail(group["line"]) or "unknown", group["what"])
        for group in groups
    )  # fmt: skip


def _tail(line: str) -> str:
    """The end of a long path."""
    return line if len(line) <= 48 else "..." + line[-45:]


def _curves(points: Sequence[Mapping[str, Any]]) -> tuple[Row, ...]:
    scale = max(max(point["recorded_bytes"], point["predicted_bytes"]) for point in points) or 1
    rows = []
    for point in points:
        recorded, predicted = (round(point[f"{side}_bytes"] / scale * _BAR) for side in ("recorded", "predicted"))
        bar = "=" * min(recorded, predicted)
        bar += ("r" if recorded > predicted else "t") * abs(recorded - predicted)
        sizes = (format_size(point["recorded_bytes"]), format_size(point["predicted_bytes"]))
        rows.append((str(point["event"]), *sizes, bar))
    return tuple(rows)
