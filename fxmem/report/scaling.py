"""The batch law for a person: fixed bytes plus bytes per sample, and the largest batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxmem.report.caveats import WITHOUT_CONTEXT, lower_bound
from fxmem.units import format_size

_PIECES = 4


def law_rows(report: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """One row for each range of batch sizes, then the largest batch where a device limits it."""
    rows = [_piece(piece) for piece in _shown(report)]
    if report.get("max_batch") is not None:
        rows.append(("largest batch", _largest(report)))
    return tuple(rows)


def law_lines(report: Mapping[str, Any]) -> tuple[str, ...]:
    """What must be said about the law: that it is missing, or not exact."""
    pieces = _pieces(report)
    why = (report.get("scaling") or {}).get("why")
    if not pieces:
        return (f"unknown: {why or 'the sizes were traced at this batch only'}",)
    hidden = len(pieces) - _PIECES
    lines = [] if hidden <= 0 else [f"{hidden} more range{'s' if hidden > 1 else ''} in --format json"]
    if not report["scaling"].get("exact"):
        lines.append(f"not proved: {why or 'the traces at different batch sizes do not match event by event'}")
    return tuple(lines)


def _pieces(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((report.get("scaling") or {}).get("pieces") or ())


def _shown(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The range that holds the batch of the report, and those around it."""
    pieces, batch = _pieces(report), report.get("batch") or 0
    at = next(
        (i for i, piece in enumerate(pieces) if piece["to_batch"] is None or batch <= piece["to_batch"]), len(pieces)
    )
    begin = max(min(at - 1, len(pieces) - _PIECES), 0)
    return pieces[begin : begin + _PIECES]


def _piece(piece: Mapping[str, Any]) -> tuple[str, str]:
    first, last = piece["from_batch"], piece["to_batch"]
    reach = f"from {first} on" if last is None else f"{first}" if first == last else f"{first} to {last}"
    fixed, slope = format_size(piece["fixed_bytes"]), piece["per_sample_bytes"]
    law = f"{fixed} + batch x {format_size(slope)}" if slope else fixed
    return f"batch {reach}", f"{law} requested at the peak"


def _largest(report: Mapping[str, Any]) -> str:
    largest = report["max_batch"]
    batch = largest.get("batch")
    if batch is None:
        return "unknown"
    margin = [] if not largest.get("safety") else [f"safety {largest['safety']:g}"]
    if largest.get("reserved_for_others_bytes"):
        margin.append(f"{format_size(largest['reserved_for_others_bytes'])} kept for others")
    text = f"at most {batch}" if lower_bound(report) else str(batch)
    counted = [", ".join(margin)] if margin else []
    if batch == 0:
        text = "none: not even one sample fits"
    elif report["peak"]["device_bytes"] is None:
        counted.append(WITHOUT_CONTEXT)
    return text + (f" ({'; '.join(counted)})" if counted else "")
