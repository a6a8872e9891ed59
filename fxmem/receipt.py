"""The receipt of a calibration: what was measured beside what was estimated. No torch.

One JSON file. It is written whole or not at all, and checked when it is read. What has been measured when
a run is interrupted lies in a file of its own beside it (``NAME.partial``), from which the next run goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

from fxmem.allocator import Plan
from fxmem.errors import FxmemError
from fxmem.linear import fit_line
from fxmem.tape import Role, Tape

SCHEMA = 1
MAX_BYTES = 2**24
PARTS = ("model", "inputs", "workspaces", "left", "first_allocated", "later_allocated", "allocated", "reserved")
"""What is held side by side: the model and its inputs on the device; what cuBLAS keeps; all that is left after
the last step; the allocated peaks of the first and of the later steps; the peaks over the whole run."""

_ENVIRONMENT = ("gpu", "driver", "cuda", "cudnn", "torch", "allocator_settings")
_HINT = "take a file that `fxmem calibrate` wrote"


def estimated(tape: Tape, plan: Plan) -> dict[str, int]:
    """The estimate of each part.

    Args:
        tape: The run, with what kernels take.
        plan: Its replay.

    Returns:
        Bytes of each of :data:`PARTS`, in allocator blocks.
    """
    sizes, events = plan.block_bytes, tape.events
    level = list(accumulate((sizes[e] if e >= 0 else -sizes[~e] for e in events), initial=0))
    setup = {e for e in events[: tape.step_starts[0]] if e >= 0}
    dead = {~e for e in events if e < 0}
    inputs = sum(sizes[s] for s in setup if tape.storages[s].role is Role.INPUT)
    kept = [s for s, what in enumerate(tape.storages) if what.role is Role.WORKSPACE and s not in dead]
    later = plan.steps[1:] or plan.steps
    return {
        "model": level[tape.step_starts[0]] - inputs,
        "inputs": inputs,
        "workspaces": sum(sizes[s] for s in kept),
        "left": level[-1],
        "first_allocated": plan.steps[0].allocated_bytes,
        "later_allocated": max(step.allocated_bytes for step in later),
        "allocated": plan.peak_allocated_bytes,
        "reserved": plan.peak_reserved_bytes,
    }


def measured(repeats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each part over the repeats."""
    parts = [_parts(run) for run in repeats]
    return {name: sum(part[name] for part in parts) / len(parts) for name in PARTS}


def _parts(run: Mapping[str, Any]) -> dict[str, int]:
    first, *later = [step["allocated_bytes"] for step in run["steps"]]
    named = {
        name: run[f"{name}_bytes"] for name in ("model", "inputs", "workspaces", "left", "allocated", "reserved")
    }  # fmt: skip
    return {**named, "first_allocated": first, "later_allocated": max(later or [first])}


def tape_hash(tape: Tape) -> str:
    """Names the sequence of births and deaths with their sizes.

    Args:
        tape: Any.
    """
    text = repr([(e, tape.storages[e].nbytes) if e >= 0 else e for e in tape.events])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def entry(batch: int, answer: Mapping[str, Any], estimate: Mapping[str, int], tape: str) -> dict[str, Any]:
    """One batch size of a receipt.

    Args:
        batch: Samples.
        answer: What the measuring process wrote, or ``{"status": "skipped", "reason": ...}``.
        estimate: Of each part.
        tape: Its hash.
    """
    found: dict[str, Any] = {"batch": batch, "status": answer["status"], "tape": tape, "estimate": dict(estimate)}
    if answer.get("reason"):
        found["reason"] = answer["reason"]
    runs = list(answer.get("repeats", ())) if answer["status"] == "measured" else []
    if runs:
        mean = measured(runs)
        found |= {"repeats": runs, "measured": mean}
        found["residual"] = {name: mean[name] - estimate[name] for name in PARTS}
    return found


def laws(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lines through the measured and through the estimated allocated peaks, at the same batches."""
    done = [item for item in entries if item["status"] == "measured"]
    return {side: _line({item["batch"]: item[side]["allocated"] for item in done}) for side in ("measured", "estimate")}


def _line(points: Mapping[int, float]) -> dict[str, float] | None:
    return asdict(fit_line(points)) if len(points) > 1 else None


def verdict(entries: Sequence[Mapping[str, Any]]) -> str:
    """One sentence: exact, or by how much at most, and in which part first."""
    done = [item for item in entries if item["status"] == "measured"]
    if not done:
        return "nothing was measured"
    wrong = [(item, name) for item in done for name in PARTS if item["residual"][name]]
    if not wrong:
        return "exact: every part equals the measurement to the byte, at every batch measured"
    worst = max(done, key=lambda item: abs(item["residual"]["reserved"]) / item["measured"]["reserved"])
    share = worst["residual"]["reserved"] / worst["measured"]["reserved"]
    names = ", ".join(dict.fromkeys(name.replace("_", " ") for _, name in wrong))
    side = "below the measurement" if share > 0 else "above it"
    if not share:
        return f"reserved is exact; differences in: {names}"
    return f"the estimate of reserved is up to {abs(share):.2%} {side}; differences in: {names}"


# ------------------------------------------------------------------ files
def write(receipt: Mapping[str, Any], path: Path) -> None:
    """Write a receipt whole or not at all.

    Raises:
        FxmemError: It cannot be written.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(json.dumps(receipt, indent=1) + "\n", encoding="utf-8")
        os.replace(new, path)  # noqa: PTH105 - by name: it is atomic
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise FxmemError(f"cannot write the receipt: {error.strerror}", where=str(path)) from error


def read(path: Path) -> dict[str, Any]:
    """Read a receipt and check it.

    Raises:
        FxmemError: It is none, or broken.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise FxmemError(f"cannot be read: {error.strerror}", where=str(path), hint=_HINT) from error
    try:
        if len(data) > MAX_BYTES:
            raise _Wrong("it is too large")
        return check(json.loads(data))
    except (ValueError, RecursionError) as error:
        what = str(error) if isinstance(error, _Wrong) else "it is no JSON"
        raise FxmemError(f"is no receipt: {what}", where=str(path), hint=_HINT) from error


class _Wrong(ValueError):
    pass


def check(data: object) -> dict[str, Any]:
    """Check a receipt's mapping.

    Raises:
        ValueError: Says what is wrong.
    """
    top = _mapping(data, "it")
    if top.get("kind") != "fxmem receipt":
        raise _Wrong("it does not say that it is one")
    if top.get("schema") != SCHEMA:
        raise _Wrong(f"its schema is {top.get('schema')!r}, this fxmem reads {SCHEMA}")
    for name in ("target", "fxmem"):
        if not isinstance(top.get(name), str):
            raise _Wrong(f"{name!r} is missing")
    _mapping(top.get("options"), "'options'")
    environment = _mapping(top.get("environment"), "'environment'")
    gpu = _mapping(environment.get("gpu"), "'gpu'")
    if not isinstance(gpu.get("name"), str) or not isinstance(gpu.get("arch"), str):
        raise _Wrong("'gpu' has no name or no arch")
    entries = top.get("entries")
    if not isinstance(entries, list):
        raise _Wrong("'entries' is no list")
    for item in entries:
        _check_entry(_mapping(item, "an entry"))
    return top


def _check_entry(item: Mapping[str, Any]) -> None:
    batch = item.get("batch")
    if not isinstance(batch, int) or batch < 1:
        raise _Wrong("an entry has no batch")
    _numbers(item.get("estimate"), f"the estimate at batch {batch}")
    if item.get("status") not in ("measured", "skipped", "oom", "failed", "timeout"):
        raise _Wrong(f"the status at batch {batch} is {item.get('status')!r}")
    if item["status"] == "measured":
        mean = _numbers(item.get("measured"), f"the measurement at batch {batch}")
        left = _numbers(item.get("residual"), f"the residual at batch {batch}")
        if any(abs(mean[name] - item["estimate"][name] - left[name]) > 1 for name in PARTS):
            raise _Wrong(f"the residuals at batch {batch} are not measurement less estimate")
        runs = item.get("repeats")
        if not isinstance(runs, list) or not all(isinstance(run, dict) for run in runs):
            raise _Wrong(f"the repeats at batch {batch} are missing")
        for run in runs:
            context = run.get("context_bytes")
            if context is not None and not isinstance(context, int):
                raise _Wrong(f"the context at batch {batch} is no number")


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Wrong(f"{what} is no mapping")
    return value


def _numbers(value: object, what: str) -> dict[str, Any]:
    found = _mapping(value, what)
    if not all(isinstance(found.get(name), int | float) and math.isfinite(found[name]) for name in PARTS):
        raise _Wrong(f"{what} lacks a part")
    return found
