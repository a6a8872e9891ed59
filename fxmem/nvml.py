"""What the driver says that a process holds on a GPU, by NVML's C functions. No torch, no package."""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint), ("nbytes", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )  # fmt: skip


class Held(NamedTuple):
    """Memory of this process on the device."""

    nbytes: int
    source: str
    """``nvml``: by its process id; ``nvml, the only process``: in a container ids differ."""


_NAMES = (
    "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetComputeRunningProcesses",
)  # fmt: skip
_MOST = 128


def process_memory(uuid: str) -> Held | None:
    """What this process holds on a GPU, or ``None`` where NVML does not say.

    Args:
        uuid: The GPU's, ``GPU-...``.
    """
    library = _library()
    handle = ctypes.c_void_p()
    if library is None or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
        return None
    listed = _processes(library, handle)
    mine = [process for process in listed if process.pid == os.getpid()]
    found = mine or (listed if len(listed) == 1 else [])
    if not found or found[0].nbytes >= 2**63:  # "not available" is the largest number
        return None
    return Held(int(found[0].nbytes), "nvml" if mine else "nvml, the only process")


def driver_version() -> str | None:
    """The driver's version, or ``None`` where NVML does not say."""
    library, text = _library(), ctypes.create_string_buffer(96)
    ask = getattr(library, "nvmlSystemGetDriverVersion", None)
    return None if ask is None or ask(text, 96) else text.value.decode()


def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return None if library.nvmlInit_v2() else library
    except (OSError, AttributeError):
        return None


def _processes(library: ctypes.CDLL, handle: ctypes.c_void_p) -> list[_Process]:
    for name in _NAMES:
        ask = getattr(library, name, None)
        count, room = ctypes.c_uint(_MOST), (_Process * _MOST)()
        if ask is not None and not ask(handle, ctypes.byref(count), room):
            return list(room[: count.value])
    return []
