"""The description of a device that cuDNN plans for."""

from __future__ import annotations

import json
from typing import NamedTuple


class _Chip(NamedTuple):
    """Limits of an architecture and, where the caller does not say, of its largest common GPU."""

    sm_count: int
    memory: int
    shared_optin: int
    threads: int
    blocks: int
    l2: int
    name: str


_GIB = 2**30
_CHIPS = {
    75: _Chip(40, 15655174144, 65536, 1024, 16, 4 << 20, "Tesla T4"),
    80: _Chip(108, 85094039552, 166912, 2048, 32, 40 << 20, "NVIDIA A100-SXM4-80GB"),
    86: _Chip(84, 50906136576, 101376, 1536, 16, 6 << 20, "NVIDIA RTX A6000"),
    89: _Chip(128, 25383272448, 101376, 1536, 24, 72 << 20, "NVIDIA GeForce RTX 4090"),
    90: _Chip(132, 150119907328, 232448, 2048, 32, 60 << 20, "NVIDIA H200"),
    100: _Chip(148, 191512641536, 232448, 2048, 32, 126 << 20, "NVIDIA B200"),
    120: _Chip(170, 33672593408, 101376, 1536, 24, 96 << 20, "NVIDIA GeForce RTX 5090"),
}
"""By compute capability: CUDA C++ Programming Guide 13, "Technical specifications per compute capability" (shared
memory that a block may opt in to, resident threads and blocks of a multiprocessor); the GPU's figures:
fxmem/data/devices.json and its data sheet."""


def planned_for(sm: int) -> int:
    """The architecture whose kernels cuDNN takes: the newest known one that is not newer than ``sm``.

    >>> planned_for(87), planned_for(121), planned_for(70)
    (86, 120, 75)
    """
    return max((known for known in _CHIPS if known <= sm), default=min(_CHIPS))


def description(sm: int, sm_count: int | None = None, memory: int | None = None) -> str:
    """CuDNN's JSON (``CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION``) of a GPU.

    Clock rates are the H200's throughout: of 120 questions on each of sm_90 and sm_80 none changed with the
    cache size, the memory, the name or the number of multiprocessors; with an A100's clocks six of sm_90's did, by
    240 to 256 KiB each.

    Args:
        sm: Compute capability as one number.
        sm_count: Multiprocessors; ``None``: those of a common GPU of the architecture.
        memory: Bytes; likewise.
    """
    sm = planned_for(sm)
    chip = _CHIPS[sm]
    return json.dumps(
        {
            "maxGridSize": [2**31 - 1, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
            "multiProcessorCount": sm_count or chip.sm_count, "smClockRateKHz": 1980000, "memClockRateKHz": 3201000,
            "l2CacheSize": chip.l2, "warpSize": 32, "maxSharedMemoryPerBlock": 49152,
            "maxSharedMemoryPerBlockOptin": chip.shared_optin, "reservedSharedMemoryPerBlock": 1024,
            "maxRegistersPerSM": 65536, "pciDeviceId": 0, "maxCtasPerSM": chip.blocks, "maxThreadsPerBlock": 1024,
            "maxThreadsPerSM": chip.threads, "isTccDriver": 0, "supportCoopLaunch": 1, "deviceVer": sm * 10,
            "driverVer": 13000, "totalGlobalMem": memory or chip.memory, "cudaDeviceId": 0, "deviceName": chip.name,
        }
    )  # fmt: skip
