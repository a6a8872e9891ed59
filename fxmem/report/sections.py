"""What a person is told, in which order: pure functions from the mapping to rows of text.

The text reporters render the same sections. A value that is not known shows as "unknown"
with the reason, never as zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fxmem.report.caveats import condition, lower_bound
from fxmem.report.modules import HEADER, flop_line, module_rows
from fxmem.report.scaling import law_lines, law_rows
from fxmem.units import format_count, format_size

UNKNOWN = "unknown"
_BAR = 24
_LARGEST = 6
_TENSOR_TEXT = 30
_TARGET_TEXT = 48

Row = tuple[str, ...]


class Section(NamedTuple):
    """A titled table and the sentences under it; either may be missing."""

    title: str
    rows: tuple[Row, ...] = ()
    header: Row = ()
    numbers: tuple[int, ...] = ()
    """Columns that are aligned to the right."""
    lines: tuple[str, ...] = ()


def sections(report: Mapping[str, Any], depth: int | None = None) -> tuple[Section, ...]:
    """All sections of an estimate, the answer first and what is missing last.

    Args:
        report: The estimate's mapping.
        depth: Levels of the per-module table, ``None`` for none.
    """
    parts = [
        Section("Peak memory", peak_rows(report), numbers=(1,)),
        Section("Batch size", law_rows(report), lines=law_lines(report)),
        Section("What it is made of, at the allocated peak", breakdown_rows(report), numbers=(1, 2)),
        Section("Where the peak is", place_rows(report)),
    ]
    if tensors := tensor_rows(report):
        shown = f"The {len(tensors)} largest tensors then" if len(tensors) > 1 else "The largest tensor then"
        parts.append(Section(shown, tensors, ("size", "role", "shape", "dtype", "name or module", "operator"), (0,)))
    if depth is not None:
        rows = module_rows(report, depth)
        lines = (flop_line(report),) if rows else ("unknown: the trace lists no modules",)
        parts.append(Section(f"Modules to depth {depth}", rows, HEADER if rows else (), (2, 3, 4, 5, 6), lines))
    return (*parts, *coverage_sections(report))


def headline(report: Mapping[str, Any]) -> tuple[str, ...]:
    """Up to three lines: what is run, on what, and how large the model is."""
    what = [report["mode"], f"batch {report['batch']}", report["dtype"]]
    if report.get("amp"):
        what.append(f"amp {report['amp']}")
    if report["mode"] == "training" and report.get("optimizer"):
        what.append(report["optimizer"])
    run = f"{_shorten(report['target'], _TARGET_TEXT)}: {', '.join(what)}"
    lines = (run, f"{_device(report['device'])}, torch {report['torch']}", _model(report))
    return tuple(line for line in lines if line)


def size(nbytes: int | None) -> str:
    """A size for a person, or "unknown".

    >>> size(None)
    'unknown'
    """
    return UNKNOWN if nbytes is None else format_size(nbytes)


def peak_rows(report: Mapping[str, Any]) -> tuple[Row, ...]:
    """The three peaks with their meaning, the peak of each step, and whether the device holds it."""
    peak = report["peak"]
    device_note = "with the CUDA context: what nvidia-smi shows"
    if peak["device_bytes"] is None:
        device_note = f"no measured CUDA context for {report['device']['name']}; give its size with --context"
    rows: list[Row] = [
        ("allocated", size(peak["allocated_bytes"]), "tensors and workspaces: torch.cuda.max_memory_allocated()"),
        ("reserved", size(peak["reserved_bytes"]), "the caching allocator: torch.cuda.max_memory_reserved()"),
        ("device", size(peak["device_bytes"]), device_note),
    ]
    rows.extend(interval_rows(report))
    rows.extend(_fit_rows(report))
    steps = report.get("steps") or ()
    if len(steps) > 1:
        each = (f"{number}: {size(step['allocated_bytes'])}" for number, step in enumerate(steps, start=1))
        rows.append(("by step", "", _shorten("  ".join(each), 75)))
    return tuple(rows)


def interval_rows(report: Mapping[str, Any]) -> list[Row]:
    """What measurements on record make of the estimate, with ``--calibration``."""
    interval = report.get("interval")
    if interval is None:
        return []
    kind = ", the phantom device" if interval["phantom"] else ""
    note = f"by {interval['measurements']} measurements on {interval['gpu']}{kind}"
    return [
        ("expected", format_size(values["expected"]),
         f"{name}, {format_size(values['low'])} to {format_size(values['high'])} {note}")
        for name in ("reserved", "device") if (values := interval[f"{name}_bytes"]) is not None
    ]  # fmt: skip


def _fit_rows(report: Mapping[str, Any]) -> list[Row]:
    capacity = report["device"].get("capacity_bytes")
    if capacity is None:
        return []
    kept = (report.get("max_batch") or {}).get("reserved_for_others_bytes") or 0
    room = capacity - kept - needed_bytes(report)
    others = f", {format_size(kept)} of it kept for others" if kept else ""
    context, unmodelled = report["peak"]["device_bytes"] is None, lower_bound(report)
    if fits(report):
        if context or unmodelled:
            left = f"{format_size(room)} left of {format_size(capacity)}{others}"
            return [("fits", "yes, if", condition(context=context, unmodelled=unmodelled, room=left))]
        return [("fits", "yes", f"{format_size(room)} of {format_size(capacity)} left{others}")]
    if room < 0:
        least = "at least " if context or unmodelled else ""
        return [("fits", "no", f"{least}{format_size(-room)} more than the device's {format_size(capacity)}{others}")]
    return [("fits", "no", f"out of memory at {format_size(capacity)}; the peaks above are those until then")]


def needed_bytes(report: Mapping[str, Any]) -> int:
    """What the device must hold: the segments, and the context where it is known."""
    peak = report["peak"]
    return int(peak["reserved_bytes"] if peak["device_bytes"] is None else peak["device_bytes"])


def fits(report: Mapping[str, Any]) -> bool:
    """Whether the plan fits the device: the estimate's own word, else its size against the capacity."""
    if report.get("fits") is not None:
        return bool(report["fits"])
    capacity = report["device"].get("capacity_bytes")
    return capacity is None or needed_bytes(report) <= capacity


def breakdown_rows(report: Mapping[str, Any]) -> tuple[Row, ...]:
    """Each part with its share of the reserved bytes and a bar; parts of zero bytes are left out."""
    parts = report["breakdown"]
    reserved = report["peak"]["reserved_bytes"]
    rows = []
    for name, nbytes in parts.items():
        label = name.replace("_", " ")
        if nbytes is None:
            rows.append((label, UNKNOWN, "", ""))
        elif nbytes:
            share = nbytes / reserved if reserved and name != "context" else None
            rows.append((label, format_size(nbytes), "" if share is None else f"{share:.1%}", _bar(share)))
    return tuple(rows)


def _bar(share: float | None) -> str:
    return "#" * round((share or 0) * _BAR)


def place_rows(report: Mapping[str, Any]) -> tuple[Row, ...]:
    """Step, phase, module, operator and source line of the peak."""
    place = report.get("peak_at")
    if not place:
        return (("unknown", "the trace has no operator at the peak"),)
    when = f"step {place['step']}, {place['phase']}" if place["step"] else "while the model is moved to the device"
    rows = [("when", when)]
    if place.get("op") or place.get("module"):
        rows.append(("where", ", operator ".join(filter(None, (place.get("module") or "the model", place.get("op"))))))
    if place.get("source"):
        rows.append(("source", str(place["source"])))
    return tuple(rows)


def tensor_rows(report: Mapping[str, Any], limit: int = _LARGEST) -> tuple[Row, ...]:
    """The largest tensors that are live at the peak."""
    place = report.get("peak_at") or {}
    tensors = sorted(place.get("tensors") or (), key=lambda tensor: -tensor["bytes"])[:limit]
    return tuple(
        (
            format_size(tensor["bytes"]),
            str(tensor["role"]).replace("_", " "),
            "x".join(map(str, tensor["shape"] or ())) or "-",
            tensor["dtype"] or "-",
            _shorten(tensor.get("name") or tensor["module"] or "-", _TENSOR_TEXT),
            _shorten(tensor["op"] or "-", _TENSOR_TEXT),
        )
        for tensor in tensors
    )


def coverage_sections(report: Mapping[str, Any]) -> tuple[Section, ...]:
    """What the figures leave out, and what was assumed; nothing where there is nothing to say."""
    coverage = report.get("coverage") or {}
    missing = tuple(map(str, coverage.get("unmodelled") or ()))
    notes = tuple(map(str, coverage.get("notes") or ()))
    parts = [Section("Not modelled (missing from the figures above)", lines=missing)] if missing else []
    return (*parts, Section("Notes", lines=notes)) if notes else tuple(parts)


def _device(device: Mapping[str, Any]) -> str:
    capacity = device.get("capacity_bytes")
    limit = "no memory limit" if capacity is None else format_size(capacity)
    return f"on {device['name']} ({device['arch']}, {limit})"


def _model(report: Mapping[str, Any]) -> str:
    model, texts = report.get("model") or {}, []
    if model.get("parameters") is not None:
        nbytes = model.get("parameter_bytes")
        texts.append(
            f"{format_count(model['parameters'])} parameters" + ("" if nbytes is None else f" ({size(nbytes)})")
        )
    if model.get("flops"):
        call = "call of generate()" if report["mode"] == "generation" else "forward pass"
        texts.append(f"{_flops(model['flops'])} in a {call}")
    return ", ".join(texts)


def _flops(count: int) -> str:
    text = format_count(count)
    return text + ("FLOP" if text[-1].isalpha() else " FLOP")


def _shorten(text: str, room: int) -> str:
    """The end of a long text, where the telling part of a path stands."""
    return text if len(text) <= room else "..." + text[3 - room :]
