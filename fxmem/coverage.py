"""What the figures leave out, what was assumed, and whether they are a lower bound for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fxmem.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What the figures leave out, and what was assumed."""

    unmodelled: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lower_bound: bool = False
    """Whether more than the CUDA context is missing: the run takes at least what the figures say."""


def cover(devices: Iterable[Device], unmodelled: Iterable[str], notes: Iterable[str]) -> Coverage:
    """Gather what must be said, each thing once.

    Args:
        devices: Whose contexts are missing where they are not known.
        unmodelled: What else is missing.
        notes: What was assumed.
    """
    missing = tuple(dict.fromkeys(unmodelled))
    contexts = [
        f"CUDA context and loaded kernels: no measured size for {device.name}"
        for device in devices
        if device.context_bytes is None
    ]
    return Coverage(
        unmodelled=tuple(dict.fromkeys((*missing, *contexts))),
        notes=tuple(dict.fromkeys(notes)),
        lower_bound=bool(missing),
    )
