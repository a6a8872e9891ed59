"""What ``fxmem calibrate`` found, for a person: each part's estimate beside its measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxmem.report.sections import Row, Section
from fxmem.units import format_size

_NAMES = {
    "model": "model on the device", "inputs": "inputs", "workspaces": "cuBLAS workspaces",
    "left": "left after the steps", "first_allocated": "peak of the first step", "later_allocated": "of later steps",
    "allocated": "peak allocated", "reserved": "peak reserved",
}  # fmt: skip


def headline(receipt: Mapping[str, Any]) -> tuple[str, ...]:
    """What was run, on what, and the verdict."""
    options, environment = receipt["options"], receipt["environment"]
    gpu = environment["gpu"]
    words = [options.get("mode"), options.get("dtype"), options.get("amp") and f"amp {options['amp']}"]
    if options.get("mode") == "training":
        words.append(options.get("optimizer"))
    what = ", ".join(str(word) for word in words if word)
    made_up = " (the phantom device: no real GPU)" if gpu.get("phantom") else ""
    return (
        f"{receipt['target']}: {what}",
        f"on {gpu['name']}{made_up}, torch {environment.get('torch')}, driver {environment.get('driver') or 'unknown'}",
        receipt["verdict"],
    )


def sections(receipt: Mapping[str, Any]) -> tuple[Section, ...]:
    """A table for each batch that was measured, the lines, and what was not measured."""
    done = [item for item in receipt["entries"] if item["status"] == "measured"]
    header = ("", "estimate", "measured", "residual")
    phantom = bool(receipt["environment"]["gpu"].get("phantom"))
    parts = [
        Section(f"Batch {item['batch']}", _rows(item), header, (1, 2, 3), _beside(item, phantom=phantom))
        for item in done
    ]
    if lines := _laws(receipt["laws"]):
        parts.append(Section("Peak allocated = fixed + batch x per sample", lines,
                             ("", "fixed", "per sample", "largest residual"), (1, 2, 3)))  # fmt: skip
    left = tuple(
        f"batch {item['batch']}: {item['status']}, {item.get('reason', '')}"
        for item in receipt["entries"] if item["status"] != "measured"
    )  # fmt: skip
    if left:
        parts.append(Section("Not measured", lines=left))
    return tuple(parts)


def _rows(item: Mapping[str, Any]) -> tuple[Row, ...]:
    return tuple(
        (title, format_size(item["estimate"][name]), format_size(round(item["measured"][name])),
         _signed(item["residual"][name]))
        for name, title in _NAMES.items()
    )  # fmt: skip


def _signed(nbytes: float) -> str:
    if not nbytes:
        return "0 B"
    return ("+" if nbytes > 0 else "-") + format_size(abs(round(nbytes)))


def _beside(item: Mapping[str, Any], *, phantom: bool) -> tuple[str, ...]:
    """Context, retries and how far the repeats lie apart."""
    runs = item["repeats"]
    contexts = [run["context_bytes"] for run in runs if run.get("context_bytes") is not None]
    context = format_size(round(sum(contexts) / len(contexts))) if contexts else "unknown (NVML names no process)"
    if phantom:
        context = "unknown (the phantom device has none)"
    spread = max(run["reserved_bytes"] for run in runs) - min(run["reserved_bytes"] for run in runs)
    retries = sum(run.get("retries", 0) for run in runs)
    repeated = f"{len(runs)} runs, reserved within {format_size(spread)}; {retries} allocation retries"
    return (f"context and loaded kernels {context}; {repeated}",)


def _laws(laws: Mapping[str, Any]) -> tuple[Row, ...]:
    return tuple(
        (name, *(format_size(round(line[key])) for key in ("fixed_bytes", "per_sample_bytes", "residual_bytes")))
        for name, line in laws.items()
        if line is not None
    )
