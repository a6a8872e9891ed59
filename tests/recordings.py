"""Memory snapshots as ``torch.cuda.memory._snapshot()`` writes them, made from tapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fxmem.tape import Tape

LINE = {"name": "step", "filename": "/home/me/train.py", "line": 12}
LIBRARY = {"name": "linear", "filename": "/lib/site-packages/torch/nn/functional.py", "line": 7}
NATIVE = {"name": "at::empty_cuda()", "filename": "??", "line": 0}


def event(action: str, addr: int, size: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 1, "frames": list(frames)}


def events_of(tape: Tape, start: int = 0) -> list[dict[str, Any]]:
    """What the allocator writes down; a storage's address is its number."""
    found = []
    for number in tape.events[start:]:
        nbytes = tape.storages[number if number >= 0 else ~number].nbytes
        if number >= 0 and nbytes:
            found.append(event("alloc", 512 * number, nbytes, NATIVE, LIBRARY, LINE))
        elif nbytes:
            found.append(event("free_requested", 512 * ~number, nbytes))
            found.append(event("free_completed", 512 * ~number, nbytes))
    return found


def snapshot(events: Iterable[dict[str, Any]], alive: dict[int, int] | None = None) -> dict[str, Any]:
    """Args: the history, and address and size of what is in use at its end."""
    blocks = [
        {"address": address, "size": nbytes + 100, "requested_size": nbytes, "state": "active_allocated"}
        for address, nbytes in (alive or {}).items()
    ]
    segment = {"device": 0, "address": 0, "total_size": 2**21, "blocks": blocks, "is_expandable": False}
    return {"segments": [segment], "device_traces": [list(events), []], "allocator_settings": {"new": None}}
