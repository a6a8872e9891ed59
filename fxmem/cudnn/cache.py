"""Answers that cuDNN gave in earlier runs, in the user's cache folder: a file a version and device."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

_SCHEMA = 1
_MOST = 20_000
"""Answers a file keeps (about 2 MB); beyond it the oldest go."""


def folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """Where fxmem may keep files: ``FXMEM_CACHE_DIR``, else the system's place; ``None``: nowhere.

    Args:
        environment: Instead of the process's.
    """
    given = os.environ if environment is None else environment
    if given.get("FXMEM_CACHE_DIR"):
        return Path(given["FXMEM_CACHE_DIR"])
    if sys.platform == "win32":
        return Path(given["LOCALAPPDATA"], "fxmem", "Cache") if given.get("LOCALAPPDATA") else None
    if given.get("XDG_CACHE_HOME"):
        return Path(given["XDG_CACHE_HOME"], "fxmem")
    if not given.get("HOME"):
        return None
    return Path(given["HOME"], "Library/Caches" if sys.platform == "darwin" else ".cache", "fxmem")


def load(path: Path) -> dict[str, int]:
    """Read answers; a file that is missing, damaged or of another kind counts as empty."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if (
        not isinstance(content, dict)
        or content.get("schema") != _SCHEMA
        or not isinstance(content.get("answers"), dict)
    ):
        return {}
    return {
        key: value
        for key, value in content["answers"].items()
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0
    }


def store(path: Path, answers: Mapping[str, int]) -> bool:
    """Add answers to a file, whole or not at all; returns whether it could be written."""
    merged = load(path) | dict(answers)
    kept = dict(list(merged.items())[-_MOST:])
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}-", delete=False
        ) as file:
            temporary = Path(file.name)
            json.dump({"schema": _SCHEMA, "answers": kept}, file, separators=(",", ":"))
        temporary.replace(path)
    except OSError:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        return False
    return True
