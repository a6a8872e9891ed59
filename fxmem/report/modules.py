"""The per-module table: what each module and everything below it accounts for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxmem.units import format_count, format_size

HEADER = ("module", "class", "parameters", "weights", "saved for backward", "at the peak", "FLOP")


def module_rows(report: Mapping[str, Any], depth: int) -> tuple[tuple[str, ...], ...]:
    """Rows in the model's order; the top module stands at depth 0.

    Args:
        report: The estimate's mapping; ``modules`` holds one mapping a module.
        depth: Deepest level shown.
    """
    modules = report.get("modules") or ()
    return tuple(_row(module) for module in modules if _level(module["path"]) <= depth)


def flop_line(report: Mapping[str, Any]) -> str:
    """What the last column counts."""
    if report["mode"] != "training":
        return "FLOP: of one step"
    return "FLOP: of one step, the forward and backward passes of all its micro-batches"


def _row(module: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        module["path"] or "(model)",
        module["kind"] or "-",
        format_count(module["parameters"]),
        format_size(module["parameter_bytes"]),
        format_size(module["saved_bytes"]),
        format_size(module["peak_bytes"]),
        format_count(module["flops"]),
    )


def _level(path: str) -> int:
    return path.count(".") + 1 if path else 0
