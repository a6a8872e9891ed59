"""What receipts teach: the context's size, and how far estimates lie from measurements. No torch.

A profile sums up the receipts of one kind of GPU. The interval of an estimate is what the measurements on
record would have made of it: the least, the median and the largest ratio of measured to estimated.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from fxmem import receipt
from fxmem.device import Device, find_device
from fxmem.errors import FxmemError

SCHEMA = 1
KIND = "fxmem profiles"
_HINT = "take a receipt of `fxmem calibrate`, or profiles of calibration/fit.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What the receipts of one GPU, driver and torch say."""

    gpu: str
    arch: str
    driver: str
    torch: str
    receipts: int
    context_bytes: tuple[int, ...]
    """CUDA context and loaded kernels, of each run in which NVML named them; sorted."""
    reserved_ratios: tuple[float, ...]
    """Measured over estimated reserved bytes, of each batch; sorted."""
    allocated_residuals: tuple[float, ...] = ()
    """Measured less estimated allocated bytes, likewise."""
    phantom: bool = False

    def on(self, device: Device) -> Device:
        """The device with the context that was measured, unless it is known already."""
        if device.context_bytes is not None or not self.context_bytes:
            return device
        context = round(statistics.median(self.context_bytes))
        return replace(device, context_bytes=context, context_source=f"measured on {self.gpu}, driver {self.driver}")

    def interval(self, reserved_bytes: int) -> dict[str, Any]:
        """Low, expected and high of an estimate.

        Args:
            reserved_bytes: Estimated.

        Returns:
            The JSON object ``interval``; ``device_bytes`` is ``None`` where no context was measured.
        """
        low, middle, high = _spread(self.reserved_ratios)
        reserved = [round(reserved_bytes * ratio) for ratio in (low, middle, high)]
        device = None
        if self.context_bytes:
            device = [round(a + b) for a, b in zip(reserved, _spread(self.context_bytes), strict=True)]
        names = ("low", "expected", "high")
        return {
            "reserved_bytes": dict(zip(names, reserved, strict=True)),
            "device_bytes": None if device is None else dict(zip(names, device, strict=True)),
            "measurements": len(self.reserved_ratios), "gpu": self.gpu, "phantom": self.phantom,
        }  # fmt: skip


def _spread(values: Iterable[float]) -> tuple[float, float, float]:
    known = sorted(values)
    return known[0], statistics.median(known), known[-1]


def fit(receipts: Iterable[Mapping[str, Any]]) -> tuple[Profile, ...]:
    """Sum receipts up, by GPU, driver and torch.

    Args:
        receipts: As :func:`fxmem.receipt.read` gives them; those without a measurement say nothing.
    """
    groups: dict[tuple[str, str, str, str], list[Mapping[str, Any]]] = {}
    for one in receipts:
        place = one["environment"]
        key = (place["gpu"]["name"], place["gpu"]["arch"], str(place.get("driver")), str(place.get("torch")))
        if _measured(one):
            groups.setdefault(key, []).append(one)
    return tuple(_profile(key, members) for key, members in sorted(groups.items()))


def _profile(key: tuple[str, str, str, str], members: list[Mapping[str, Any]]) -> Profile:
    entries = [entry for one in members for entry in _measured(one)]
    phantom = any(one["environment"]["gpu"].get("phantom") for one in members)
    contexts = [run.get("context_bytes") for entry in entries for run in entry["repeats"]]
    known = sorted(context for context in contexts if context is not None)
    gpu, arch, driver, torch = key
    return Profile(
        gpu=gpu, arch=arch, driver=driver, torch=torch, receipts=len(members), phantom=phantom,
        context_bytes=() if phantom else tuple(known),  # the phantom has none, which is not a measurement
        reserved_ratios=tuple(sorted(e["measured"]["reserved"] / e["estimate"]["reserved"] for e in entries)),
        allocated_residuals=tuple(sorted(e["residual"]["allocated"] for e in entries)),
    )  # fmt: skip


def _measured(one: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [e for e in one["entries"] if e["status"] == "measured" and e["estimate"]["reserved"] > 0]


# ------------------------------------------------------------------ files
def to_json(profiles: Iterable[Profile]) -> dict[str, Any]:
    """The file of profiles."""
    return {"kind": KIND, "schema": SCHEMA, "profiles": [asdict(profile) for profile in profiles]}


def shipped() -> tuple[Profile, ...]:
    """The profiles that come with fxmem.

    >>> isinstance(shipped(), tuple)
    True
    """
    text = resources.files("fxmem").joinpath("data/profiles.json").read_text(encoding="utf-8")
    return _profiles(json.loads(text))


def read_calibration(path: Path, device: Device) -> Profile:
    """The profile for a device, out of a receipt or a file of profiles.

    Args:
        path: The file.
        device: What is estimated for.

    Raises:
        FxmemError: The file is neither, or says nothing about this device's architecture.
    """
    found = _read(path)
    of_arch = [profile for profile in found if profile.arch == device.arch and profile.reserved_ratios]
    if not of_arch:
        known = ", ".join(sorted({f"{profile.gpu} ({profile.arch})" for profile in found})) or "none"
        raise FxmemError(
            f"has no measurement on {device.arch}; it has {known}",
            where=str(path),
            hint="choose --device or another file",
        )
    return _named(of_arch, device) or max(of_arch, key=_weight)


def shipped_for(device: Device) -> Profile | None:
    """The profile that comes with fxmem for this very GPU, where there is one."""
    return _named([profile for profile in shipped() if profile.reserved_ratios], device)


def _named(profiles: Iterable[Profile], device: Device) -> Profile | None:
    """The one with the most measurements on a GPU of this name."""
    mine = [one for one in profiles if one.arch == device.arch and find_name(one.gpu) == device.name]
    return max(mine, key=_weight, default=None)


def find_name(gpu: str) -> str | None:
    """The table's name of a GPU that a driver names.

    >>> find_name("NVIDIA H200")
    'h200'
    """
    try:
        return find_device(gpu).name
    except FxmemError:
        return None


def _weight(profile: Profile) -> int:
    return len(profile.reserved_ratios)


def _read(path: Path) -> tuple[Profile, ...]:
    try:
        text = path.read_bytes()
        data = json.loads(text) if len(text) <= receipt.MAX_BYTES else None
        if isinstance(data, dict) and data.get("kind") == KIND:
            return _profiles(data)
    except OSError as error:
        raise FxmemError(f"cannot be read: {error.strerror}", where=str(path), hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        what = str(error) if isinstance(error, _Wrong) else "it is no JSON"
        raise FxmemError(f"is no calibration: {what}", where=str(path), hint=_HINT) from error
    return fit([receipt.read(path)])


class _Wrong(ValueError):
    pass


def _profiles(data: Mapping[str, Any]) -> tuple[Profile, ...]:
    rows = data.get("profiles")
    if data.get("schema") != SCHEMA or not isinstance(rows, list):
        raise _Wrong(f"its schema is {data.get('schema')!r}, this fxmem reads {SCHEMA}")
    return tuple(_row(row) for row in rows)


def _row(row: object) -> Profile:
    if not isinstance(row, dict) or set(row) != {item.name for item in fields(Profile)}:
        raise _Wrong("a profile has other fields")
    for name in ("context_bytes", "reserved_ratios", "allocated_residuals"):
        values = row[name]
        if not isinstance(values, list) or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
            raise _Wrong(f"{name} is no list of numbers")
    if not all(isinstance(row[name], str) for name in ("gpu", "arch", "driver", "torch")):
        raise _Wrong("a profile does not name its GPU")
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Profile(**given)


# ------------------------------------------------------------------ the page
def accuracy_rows(receipts: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, ...], ...]:
    """Rows of ``docs/accuracy.md`` from receipts of real GPUs: error and share of under-estimates.

    Args:
        receipts: All on record; those of the phantom device are passed over.

    Returns:
        Target, mode, GPU, batches, largest error of reserved, share of batches estimated too low.
    """
    rows = []
    for one in receipts:
        entries = _measured(one)
        if one["environment"]["gpu"].get("phantom") or not entries:
            continue
        errors = [e["residual"]["reserved"] / e["measured"]["reserved"] for e in entries]
        low = sum(error > 0 for error in errors) / len(errors)
        batches = ", ".join(str(e["batch"]) for e in entries)
        worst = max(errors, key=abs)
        mode = str(one["options"].get("mode"))
        rows.append((one["target"], mode, one["environment"]["gpu"]["name"], batches, f"{-worst:+.2%}", f"{low:.0%}"))
    return tuple(sorted(rows))
