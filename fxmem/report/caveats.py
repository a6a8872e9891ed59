"""What a verdict leaves out: the CUDA context where it is unknown, and what is not modelled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WITHOUT_CONTEXT = "without the CUDA context, which is unknown"


def lower_bound(report: Mapping[str, Any]) -> bool:
    """Whether more than the context is missing from the figures of a report."""
    return bool((report.get("coverage") or {}).get("lower_bound"))


def condition(*, context: bool, unmodelled: bool, room: str) -> str:
    """What must hold for what fits by the figures.

    Args:
        context: Whether the context is missing.
        unmodelled: Whether something else is.
        room: What is left for them.

    >>> condition(context=True, unmodelled=False, room="1.00 GiB left")
    'the CUDA context (unknown) takes at most the 1.00 GiB left'
    """
    if context and unmodelled:
        return f"the CUDA context (unknown) and what else is not modelled (see below) take at most the {room}"
    missing = "the CUDA context (unknown)" if context else "what is not modelled (see below)"
    return f"{missing} takes at most the {room}"
