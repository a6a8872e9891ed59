"""Find the installed cuDNN and ask it in a process of its own, which cannot harm this one."""

from __future__ import annotations

import ctypes.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fxmem.cudnn.question import Convolution

_ROOT = Path(__file__).parents[2]
"""The folder that fxmem is imported from."""

_START = "import sys; sys.path.insert(0, sys.argv[1]); from fxmem.cudnn.planner import main; main()"
_RESTARTS = 3
_SECONDS = 30.0
"""A hundred questions take about 0.3 s, of which 0.12 s are the start (2 cores of 2026)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """An installed cuDNN."""

    path: str
    version: int | None
    """As ``cudnnGetVersion`` gives it (92400 for 9.24.0), where the installation tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """What came back from the process."""

    version: int | None
    """``None``: cuDNN could not be asked at all."""
    workspaces: tuple[int | None, ...]
    """Bytes for each question; ``None`` where there is no answer."""
    reason: str = ""
    """Why there are answers missing."""


def find_library() -> Library | None:
    """The libcudnn that a CUDA build of torch would load: NVIDIA's wheel first, then the system's."""
    for entry in dict.fromkeys(sys.path):
        path = Path(entry, "nvidia", "cudnn", "lib", "libcudnn.so.9")
        if entry and path.is_file():
            found = (
                re.fullmatch(r"nvidia_cudnn_cu\d+-([\d.]+)\.dist-info", p.name)
                for p in Path(entry).glob("nvidia_cudnn_cu*")
            )
            version = next((match[1] for match in found if match), "")
            return Library(path=str(path), version=_version(version))
    name = ctypes.util.find_library("cudnn") if sys.platform == "linux" else None
    return Library(path=name, version=None) if name and name.endswith(".so.9") else None


def _version(text: str) -> int | None:
    """``9.24.0.43`` as 92400."""
    numbers = text.split(".")
    if len(numbers) < 3:
        return None
    return int(numbers[0]) * 10000 + int(numbers[1]) * 100 + int(numbers[2])


def plan(library: str, device: str, questions: Sequence[Convolution], seconds: float = _SECONDS) -> Plans:
    """Ask a libcudnn for the workspaces of the plans that PyTorch would choose.

    Args:
        library: Path or name of libcudnn.
        device: cuDNN's description of the device (:func:`fxmem.cudnn.target.description`).
        questions: What is asked.
        seconds: How long it may take in all.
    """
    answers: list[int | None] = []
    version, reason = None, ""
    for _ in range(_RESTARTS):
        part = _ask(library, device, questions[len(answers) :], seconds)
        version = part.version if version is None else version
        answers += part.workspaces
        reason = part.reason or reason
        if part.version is None or part.reason.startswith("took") or len(answers) >= len(questions):
            break
        answers.append(None)  # the question that the process died of
    return Plans(version=version, workspaces=(*answers, *[None] * (len(questions) - len(answers))), reason=reason)


def _ask(library: str, device: str, questions: Sequence[Convolution], seconds: float) -> Plans:
    request = json.dumps({"library": library, "device": device, "questions": [q.wire for q in questions]}) + "\n"
    command = [sys.executable, "-I", "-S", "-c", _START, str(_ROOT)]
    late = False
    try:
        with subprocess.Popen(  # noqa: S603 - our own code
            command,
            env=_environment(library),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            try:
                output, _ = process.communicate(request, timeout=seconds)
            except subprocess.TimeoutExpired:
                late = True
                process.kill()
                output, _ = process.communicate()
    except (OSError, ValueError) as error:
        return Plans(version=None, workspaces=(), reason=f"cannot start a process: {error}")
    return _read(output, len(questions), f"took more than {seconds:g} s" if late else "the process ended early")


def _environment(library: str) -> dict[str, str]:
    """The process's environment, in which cuDNN finds its neighbours (cuBLASLt, NVRTC) among NVIDIA's wheels."""
    wheels = [parent for parent in Path(library).parents if parent.name == "nvidia"]
    folders = sorted(str(path) for parent in wheels[:1] for path in parent.glob("*/lib"))
    given = os.environ.get("LD_LIBRARY_PATH", "")
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join([*folders, *([given] if given else [])])}


def _read(output: str, asked: int, failure: str) -> Plans:
    """Read the process's lines; the last may be cut off."""
    lines = []
    for line in output.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:  # noqa: PERF203 - what follows is lost
            break
    if not lines or not isinstance(lines[0], dict) or "version" not in lines[0]:
        error = lines[0].get("error") if lines and isinstance(lines[0], dict) else None
        return Plans(version=None, workspaces=(), reason=str(error or failure))
    answers = tuple(value if isinstance(value, int) else None for value in lines[1:])
    return Plans(version=int(lines[0]["version"]), workspaces=answers, reason="" if len(answers) == asked else failure)
