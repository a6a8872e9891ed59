"""The answer of ``fxmem batch`` for a person: the batch, what is left, and what the next one lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fxmem.report.caveats import lower_bound
from fxmem.report.plot import LEGEND, curve_rows
from fxmem.report.scaling import law_lines, law_rows
from fxmem.report.sections import UNKNOWN, Row, Section, coverage_sections, place_rows, size, tensor_rows
from fxmem.units import format_size


def headline(report: Mapping[str, Any]) -> tuple[str, ...]:
    """What is run, on what."""
    what = [
        report["mode"],
        *([] if report.get("at_batch") is None else [f"batch {report['at_batch']}"]),
        report["dtype"],
    ]
    if report.get("amp"):
        what.append(f"amp {report['amp']}")
    if report.get("optimizer"):
        what.append(report["optimizer"])
    names = ", ".join(_device_name(device) for device in report["devices"])
    return f"{report['target']}: {', '.join(what)}", f"on {names}, torch {report['torch']}"


def sections(report: Mapping[str, Any]) -> tuple[Section, ...]:
    """The answer first, what binds it, then what is missing."""
    first, *others = report["devices"]
    parts = [_devices(report)] if others else []
    title = f"Largest {first['axis']}"
    parts.append(Section(f"{title} on {first['name']}" if others else title, answer_rows(first, lower_bound(report))))
    if first["axis"] == "batch":
        parts.append(Section("What the tensors ask for", law_rows(first), lines=law_lines(first)))
    drawn = next((device for device in report["devices"] if device["curve"]), None)
    if drawn is not None:
        label = f"Memory against {drawn['axis']}" + (f" on {drawn['name']}" if others else "")
        parts.append(Section(label, curve_rows(drawn), numbers=(0, 1), lines=(LEGEND,)))
    if first["next"] is not None:
        binding = {"peak_at": first["next"]["at"]}
        parts.append(Section(f"Where {first['axis']} {first['next']['batch']} runs out of memory", place_rows(binding)))
        if tensors := tensor_rows(binding):
            header = ("size", "role", "shape", "dtype", "name or module", "operator")
            parts.append(Section(f"The {len(tensors)} largest tensors then", tensors, header, (0,)))
    return (*parts, *coverage_sections(report))


def answer_rows(device: Mapping[str, Any], least: bool = False) -> tuple[Row, ...]:
    """The batch on one device with its margin, and the next batch's shortfall.

    Args:
        device: An entry of the report's ``devices``.
        least: Whether more than the context is missing from the figures.
    """
    batch, following = device["batch"], device["next"]
    axis = device["axis"]
    rows = [
        (axis, _number(batch, least), _proof(device, least)),
        ("may use", size(device["allocator_bytes"]), _share(device)),
    ]
    if batch:
        rows.append(("reserved", size(device["reserved_bytes"]), f"the caching allocator's peak at {axis} {batch}"))
        rows.append(("margin", size(device["margin_bytes"]), "of what it may use"))
    if following is not None:
        missing = format_size(following["missing_bytes"])
        rows.append((f"{axis} {following['batch']}", f"lacks {missing}", _request(following)))
    return tuple(rows)


def _number(batch: int, least: bool) -> str:
    if not batch:
        return "none"
    return f"at most {batch}" if least else str(batch)


def _request(following: Mapping[str, Any]) -> str:
    """The request that fails, and all that is reserved beside it: with what is lacking they are what may be used."""
    request, segment = format_size(following["requested_bytes"]), format_size(following["segment_bytes"])
    rounded = "" if segment == request else f" (a segment of {segment})"
    held = f"{format_size(following['allocated_bytes'])} allocated"
    if idle := following["reserved_bytes"] - following["allocated_bytes"]:
        held = (
            f"{format_size(following['reserved_bytes'])} reserved: {held}, {format_size(idle)} in free blocks too small"
        )
    return f"for a request of {request}{rounded} beside {held}"


def _proof(device: Mapping[str, Any], least: bool) -> str:
    axis = device["axis"]
    fits = "what is modelled fits" if least else "it fits"
    step = "" if device["context_bytes"] is not None else " without the context (unknown)"
    step += "" if device["multiple_of"] == 1 else f", a multiple of {device['multiple_of']}"
    if not device["batch"]:
        return f"not even the smallest {axis} fits" if device["proved"] else f"no {axis} is known to fit"
    if not device["proved"]:
        above = "the next one is not known not to"
        if device["next"] is not None:
            above = f"{axis} {device['next']['batch']} does not; what lies between was not traced"
        return f"{fits.removeprefix('it ')}{step}; {above}"
    ends = {
        "memory": ", the next one does not",
        "range": "; the search ends here" if axis == "batch" else "; the end of the range: widen it",
        "program": ", the next one does not run",
    }
    return f"replayed: {fits}{step}{ends[device['bound']]}"


def _share(device: Mapping[str, Any]) -> str:
    taken = format_size(device["capacity_bytes"])
    if device["reserved_for_others_bytes"]:
        taken = f"({taken} - {format_size(device['reserved_for_others_bytes'])} for others)"
    parts = [taken]
    if device["safety"] != 1:
        parts.append(f"x {device['safety']:g}")
    if device["processes"] > 1:
        parts.append(f"/ {device['processes']} processes")
    context = device["context_bytes"]
    if context is None:
        return f"{' '.join(parts)}, without the context (unknown)"
    return f"{' '.join(parts)} - {format_size(context)} for the context"


def _devices(report: Mapping[str, Any]) -> Section:
    """One row a device, those that hold the wanted batch first, the smallest memory first."""
    wanted, axis = report["wanted_batch"], report["axis"]
    least, rows = lower_bound(report), []
    for device in report["devices"]:
        following = device["next"]
        lacks = UNKNOWN if following is None else format_size(following["missing_bytes"])
        batch = device["batch"]
        yes = "yes, if" if least or device["context_bytes"] is None else "yes"
        rows.append((device["name"], device["arch"], size(device["capacity_bytes"]), yes if batch >= wanted else "no",
                     _number(batch, least), size(device["margin_bytes"] if batch else None), lacks))  # fmt: skip
    header = ("device", "arch", "memory", f"holds {axis} {wanted}", f"largest {axis}", "margin", "the next lacks")
    lines = (
        ("if: there is room too for what is not modelled (see below)",) if any("yes, if" in row for row in rows) else ()
    )
    return Section("Devices, the least memory that holds it first", tuple(rows), header, (2, 4, 5, 6), lines)


def _device_name(device: Mapping[str, Any]) -> str:
    return f"{device['name']} ({device['arch']}, {size(device['capacity_bytes'])})"
