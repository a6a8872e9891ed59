"""Which of the user's lines is running: the innermost frame outside torch and fxmem."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, TracebackType

import torch

_HERE = str(Path(__file__).resolve().parent.parent) + os.sep
_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep
_SKIP, _USER, _STOP = 0, 1, 2


class SourceLines:
    """Finds source lines; remembers per code object whether it counts."""

    def __init__(self) -> None:
        self._kinds: dict[CodeType, int] = {}
        self._names: dict[tuple[CodeType, int], str] = {}

    def current(self) -> str:
        """``path:line`` of the innermost frame that is neither torch's nor fxmem's, else empty."""
        frame = sys._getframe(1)
        kinds = self._kinds
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(code)
            if kind is None:
                kind = kinds[code] = _kind(code)
            if kind == _USER:
                key = (code, frame.f_lineno)
                name = self._names.get(key)
                if name is None:
                    name = self._names[key] = f"{_short(code.co_filename)}:{frame.f_lineno}"
                return name
            if kind == _STOP:
                return ""
            frame = frame.f_back  # type: ignore[assignment]
        return ""


def innermost(trace: TracebackType | None) -> str:
    """``path:line`` of the innermost frame of a traceback that is the user's, else empty."""
    found = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if _kind(code) == _USER:
            found = f"{_short(code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _kind(code: CodeType) -> int:
    path = code.co_filename
    if path.startswith(_HERE):
        return _STOP if path.endswith(f"{os.sep}run.py") else _SKIP
    if path.startswith((_TORCH, "<")) or f"{os.sep}contextlib.py" in path:
        return _SKIP
    return _USER


def _short(path: str) -> str:
    """Relative to site-packages or to the working directory where that is shorter."""
    marker = f"site-packages{os.sep}"
    if marker in path:
        return path.split(marker, 1)[1]
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else path
