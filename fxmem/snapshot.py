"""Reads a recording that ``torch.cuda.memory._snapshot()`` made. No torch, and no code of the file runs.

A pickle is a program. This reader carries out only the opcodes that build containers, texts and
numbers; the first other one ends it, before anything is looked up or called. What it does not know
in the recording is passed over, what it needs is checked.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

from fxmem.errors import FxmemError

MAX_BYTES = 2**29
"""A recording of a million allocations takes about this much."""

_HINT = "write it with torch.cuda.memory._dump_snapshot(FILE) after torch.cuda.memory._record_memory_history()"
_OPCODES = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.DUP, pickle.NONE,
    pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINFLOAT,
    pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.EMPTY_TUPLE,
    pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS,
    pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS, pickle.BINGET, pickle.LONG_BINGET, pickle.BINPUT,
    pickle.LONG_BINPUT, pickle.MEMOIZE,
)  # fmt: skip
_LIBRARIES = (("cublas", "cuBLAS workspace"), ("cudnn", "cuDNN"))


class Frame(NamedTuple):
    """A Python line on the stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Recorded(NamedTuple):
    """One allocation of the recording."""

    nbytes: int
    """Requested bytes."""
    stack: tuple[Frame, ...] = ()
    """Its Python lines, the innermost first; empty where it was made before the recording."""
    library: str = ""
    """The library that asked for it, where the C++ frames say so."""

    @property
    def line(self) -> str:
        """The innermost line that is not in an installed package, ``path/train.py:12``; else the innermost."""
        own = (frame for frame in self.stack if "site-packages" not in frame.file and "<" not in frame.file)
        found = next(own, self.stack[0] if self.stack else None)
        return "" if found is None else str(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What the caching allocator of one device was asked for, in order."""

    allocations: tuple[Recorded, ...]
    """Those from before the recording first, then in the order of their birth."""
    before: int
    """How many of them are older than the recording."""
    events: tuple[int, ...]
    """As on a tape: ``i >= 0`` allocates number i, ``~i`` frees it."""
    peak_reserved_bytes: int
    device: int = 0
    notes: tuple[str, ...] = ()


def read_snapshot(path: Path) -> Recording:
    """Read a recording.

    Args:
        path: The pickle.

    Raises:
        FxmemError: It cannot be read, is too large, is no plain data or no recording.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise FxmemError(f"cannot be read: {error.strerror}", where=str(path), hint=_HINT) from error
    if len(data) > MAX_BYTES:
        raise FxmemError(
            f"is larger than {MAX_BYTES >> 20} MiB", where=str(path), hint="record fewer steps, or with max_entries"
        )
    try:
        return parse(load_plain(data))
    except FxmemError as error:
        raise FxmemError(error.what, where=str(path), hint=_HINT) from error


_Python: Any = pickle._Unpickler  # the one in Python: its opcodes are a table


class _Plain(_Python):  # type: ignore[misc]
    """An unpickler that has no way to name anything."""

    dispatch: Mapping[int, Callable[..., None]] = {code[0]: _Python.dispatch[code[0]] for code in _OPCODES}

    def find_class(self, module: str, name: str) -> Any:
        raise FxmemError(f"is no plain data: it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise FxmemError(f"is no plain data: it refers to {type(pid).__name__} outside")


def load_plain(data: bytes) -> object:
    """Unpickle containers, texts and numbers; nothing else can be in it.

    Args:
        data: The pickle.

    Raises:
        FxmemError: It asks for more than that, or is broken.

    >>> load_plain(pickle.dumps({"a": [1, (2.5, None)]}))
    {'a': [1, (2.5, None)]}
    """
    try:
        return cast("object", _Plain(io.BytesIO(data)).load())
    except FxmemError:
        raise
    except KeyError as error:  # an opcode that is not in the table, or a memo that is not there
        code = error.args[0] if error.args else None
        what = f"opcode {bytes([code])!r}" if isinstance(code, int) and 0 <= code < 256 else "a missing part"
        raise FxmemError(f"is no plain data: {what}") from error
    except (EOFError, IndexError) as error:
        raise FxmemError("ends too early: it is no pickle, or a broken one") from error
    except Exception as error:  # whatever a broken pickle makes of the stack
        raise FxmemError(f"is no pickle, or a broken one: {type(error).__name__}: {error}") from error


def parse(data: object) -> Recording:
    """Check a snapshot's plain data and bring it into order.

    Raises:
        FxmemError: It is no snapshot, or its history is missing.
    """
    if not isinstance(data, dict) or not isinstance(data.get("device_traces"), list):
        raise FxmemError("is no memory snapshot: it has no `device_traces`")
    traces = [trace if isinstance(trace, list) else [] for trace in data["device_traces"]]
    device = max(range(len(traces)), key=lambda i: len(traces[i]), default=0)
    if not traces or not traces[device]:
        raise FxmemError("holds no history, only the state at its end")
    used = [i for i, trace in enumerate(traces) if trace]
    notes = () if len(used) == 1 else (f"devices {used} have a history; device {device}, with the longest, is shown",)
    reader = _Reader(data.get("segments"), device)
    for at, event in enumerate(traces[device]):
        reader.event(at, event)
    return reader.finish(device, notes)


class _Reader:
    """Walks the history once; never leaves :func:`parse`."""

    def __init__(self, segments: object, device: int) -> None:
        self.born: list[Recorded] = []
        self.old: list[Recorded] = []
        self.events: list[tuple[bool, int, bool]] = []
        """Whether it is a birth, the number, whether the number is among the old ones."""
        self.live: dict[int, tuple[int, bool]] = {}
        self.stacks: dict[int, tuple[tuple[Frame, ...], str]] = {}
        self.at_end: dict[int, int] = {}
        self.reserved, self.highest, self.end = 0, 0, 0
        for segment in segments if isinstance(segments, list) else []:
            if isinstance(segment, dict) and segment.get("device", device) == device:
                self.end += _size(segment, "total_size", "a segment")
                self.at_end.update(_blocks(segment))

    def event(self, at: int, event: object) -> None:
        if not isinstance(event, dict):
            raise FxmemError(f"event {at} is no mapping")
        where = f"event {at}"
        match event.get("action"):
            case "alloc":
                self._alloc(_size(event, "addr", where), _size(event, "size", where), event.get("frames"))
            case "free_requested" | "free":
                self._free(_size(event, "addr", where), _size(event, "size", where))
            case "segment_alloc" | "segment_map":
                self.reserved += _size(event, "size", where)
            case "segment_free" | "segment_unmap":
                self.reserved -= _size(event, "size", where)
            case _:  # free_completed, oom, snapshot, and what comes later
                return
        self.highest = max(self.highest, self.reserved)

    def _alloc(self, address: int, nbytes: int, frames: object) -> None:
        if address in self.live:  # its free was lost
            self.events.append((False, *self.live.pop(address)))
        stack, library = self._stack(frames)
        self.live[address] = (len(self.born), False)
        self.events.append((True, len(self.born), False))
        self.born.append(Recorded(nbytes, stack, library))

    def _free(self, address: int, nbytes: int) -> None:
        known = self.live.pop(address, None)
        if known is None:
            known = (len(self.old), True)
            self.old.append(Recorded(nbytes))
        self.events.append((False, *known))

    def _stack(self, frames: object) -> tuple[tuple[Frame, ...], str]:
        if not isinstance(frames, list):
            return (), ""
        if id(frames) not in self.stacks:  # the pickle shares equal stacks; all objects live as long as the data
            self.stacks[id(frames)] = _frames(frames)
        return self.stacks[id(frames)]

    def finish(self, device: int, notes: tuple[str, ...]) -> Recording:
        """Number the old ones first; add those that lived all through."""
        seen = {address for address, (_, old) in self.live.items() if not old}
        self.old += [Recorded(nbytes) for address, nbytes in self.at_end.items() if address not in seen]
        shift = len(self.old)
        events = [
            number + (0 if old else shift) if birth else ~(number + (0 if old else shift))
            for birth, number, old in self.events
        ]
        started = max(self.end - self.reserved, 0)
        return Recording(
            allocations=(*self.old, *self.born), before=shift, events=tuple(events), device=device, notes=notes,
            peak_reserved_bytes=started + self.highest,
        )  # fmt: skip


def _frames(frames: Sequence[object]) -> tuple[tuple[Frame, ...], str]:
    """The Python lines of a stack, and the library that its C++ frames name."""
    lines, names = [], []
    for frame in frames:
        if not isinstance(frame, dict):
            continue
        file, name, line = frame.get("filename"), frame.get("name"), frame.get("line")
        if isinstance(file, str) and file.endswith(".py"):
            lines.append(Frame(file, line if isinstance(line, int) else 0, name if isinstance(name, str) else ""))
        elif isinstance(name, str):
            names.append(name.lower())
    library = next((title for word, title in _LIBRARIES for name in names if word in name and "workspace" in name), "")
    return tuple(lines), library


def _blocks(segment: Mapping[Any, Any]) -> dict[int, int]:
    """Address and requested bytes of the blocks in use."""
    found: dict[int, int] = {}
    blocks = segment.get("blocks")
    at = _size(segment, "address", "a segment")
    for block in blocks if isinstance(blocks, list) else []:
        if not isinstance(block, dict):
            raise FxmemError("a block of a segment is no mapping")
        size = _size(block, "size", "a block")
        if block.get("state") == "active_allocated":
            address = _size(block, "address", "a block") if "address" in block else at
            found[address] = _size(block, "requested_size", "a block") if "requested_size" in block else size
        at += size
    return found


def _size(mapping: Mapping[Any, Any], key: str, where: str) -> int:
    value = mapping.get(key)
    if not isinstance(value, int) or not 0 <= value < 2**64:
        raise FxmemError(f"{where} has no usable {key!r}")
    return value
