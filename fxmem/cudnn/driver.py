"""A CUDA driver that is not there: just enough of ``libcuda.so.1`` for cuDNN to plan.

Part of the planner's process, standalone like :mod:`fxmem.cudnn.planner`. cuDNN plans for a
described device, but a few of its engines (depthwise half precision among them) still ask the
driver and are passed over where there is none, as on a machine without a GPU. So this writes a
shared library of jumps into a memory file, loads it under the driver's name before cuDNN asks
for it, and points the jumps at Python functions. A real driver is never loaded or touched.
Format: System V ABI, ELF-64 object file format; the driver's functions: CUDA driver API, cuda.h 13.0.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import struct
from collections.abc import Callable, Sequence

_SONAME = "libcuda.so.1"
_SLOTS = "fxmem_slots"
_PAGE = 0x10000
"""The largest page of the two machines; within reach (1 MiB) of AArch64's literal load."""

_NOT_FOUND = 500
"""``CUDA_ERROR_NOT_FOUND``."""

_MACHINES = {"x86_64": 62, "aarch64": 183}
"""``e_machine``."""

_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * 6)

Function = Callable[[int, int, int, int, int, int], int]


def _jump(machine: int, distance: int) -> bytes:
    """Eight bytes of code that jump to the address stored ``distance`` bytes further on."""
    if machine == _MACHINES["x86_64"]:
        return b"\xff\x25" + struct.pack("<i", distance - 6) + b"\x90\x90"  # jmp *distance(%rip)
    return struct.pack("<II", 0x58000010 | distance // 4 << 5, 0xD61F0200)  # ldr x16, distance; br x16


def shared_library(names: Sequence[str], machine: int) -> bytes:
    """The bytes of a library that exports ``names`` and the table of addresses that they jump to.

    Args:
        names: Functions; the n-th jumps to the n-th address at the symbol ``fxmem_slots``.
        machine: ELF's number of the machine.
    """
    symbols = [*names, _SLOTS]
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in (*symbols, _SONAME))
    at_string = [strings.index(b"\0" + name.encode() + b"\0") + 1 for name in (*symbols, _SONAME)]
    at_symbols = 64 + 4 * 56
    at_strings = at_symbols + 24 * (len(symbols) + 1)
    at_hash = -(-(at_strings + len(strings)) // 8) * 8
    at_code = -(-(at_hash + 4 * (4 + len(symbols))) // 16) * 16
    dynamic = struct.pack(
        "<14q", 14, at_string[-1], 4, at_hash, 5, at_strings, 6, at_symbols, 10, len(strings), 11, 24, 0, 0
    )  # SONAME, HASH, STRTAB, SYMTAB, STRSZ, SYMENT, end
    at_slots = _PAGE + len(dynamic)
    places = [*(at_code + 8 * i for i in range(len(names))), at_slots]
    table = struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0) + b"".join(
        struct.pack("<IBBHQQ", string, 0x10 | (1 if name == _SLOTS else 2), 0, 1, place, 8)
        for name, string, place in zip(symbols, at_string, places, strict=False)
    )
    chain = struct.pack(f"<{4 + len(symbols)}I", 1, 1 + len(symbols), 1, 0, *(*range(2, len(symbols) + 1), 0))
    code = b"".join(_jump(machine, at_slots + 8 * i - places[i]) for i in range(len(names)))
    first, second = at_code + len(code), len(dynamic) + 8 * len(names)
    headers = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, at, at, at, size, size, align)
        for kind, flags, at, size, align in (
            (1, 5, 0, first, _PAGE), (1, 6, _PAGE, second, _PAGE), (2, 6, _PAGE, len(dynamic), 8),
            (0x6474E551, 6, 0, 0, 16),
        )  # LOAD code, LOAD data, DYNAMIC, GNU_STACK
    )  # fmt: skip
    start = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, 4, 64, 0, 0
    )
    image = bytearray(_PAGE + second)
    for at, part in ((0, start), (64, headers), (at_symbols, table), (at_strings, strings), (at_hash, chain)):
        image[at : at + len(part)] = part
    image[at_code : at_code + len(code)] = code
    image[_PAGE : _PAGE + len(dynamic)] = dynamic
    return bytes(image)


_NAMES = (
    "cuInit", "cuDriverGetVersion", "cuGetProcAddress_v2", "cuGetExportTable", "cuGetErrorString", "cuGetErrorName",
    "cuDeviceGet", "cuDeviceGetCount", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxReset", "cuCtxGetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuCtxGetDevice",
    "cuCtxGetLimit",
    "cuLibraryLoadData", "cuLibraryLoadFromFile", "cuLibraryGetKernel", "cuLibraryUnload", "cuKernelGetAttribute",
    "cuKernelSetAttribute", "cuModuleLoadData", "cuModuleLoadDataEx", "cuModuleLoadFatBinary", "cuModuleGetFunction",
    "cuModuleGetGlobal_v2", "cuModuleUnload", "cuFuncGetAttribute", "cuFuncSetAttribute", "cuLinkCreate",
    "cuLinkCreate_v2",
    "cuLinkAddData", "cuLinkAddData_v2", "cuLinkAddFile_v2", "cuLinkComplete", "cuLinkDestroy", "cuLaunchKernel",
    "cuLaunchKernelEx", "cuLaunchCooperativeKernel", "cuMemcpyDtoH_v2", "cuStreamGetCtx", "cuStreamSynchronize",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuOccupancyMaxPotentialClusterSize", "cuTensorMapEncodeTiled",
)  # fmt: skip
"""What cuDNN 9.24 and its CUDA runtime look up by name in the library itself."""

_HANDLES = (
    "cuLibraryLoadData", "cuLibraryLoadFromFile", "cuLibraryGetKernel", "cuModuleLoadData", "cuModuleLoadDataEx",
    "cuModuleLoadFatBinary", "cuModuleGetFunction", "cuCtxGetCurrent", "cuDevicePrimaryCtxRetain", "cuStreamGetCtx",
)  # fmt: skip
"""Functions whose result is a handle, written to their first argument (the last: to the second)."""


class _Driver:
    """The functions; each takes six arguments as the registers hold them and returns a ``CUresult``."""

    def __init__(self, device: dict[str, int]) -> None:
        self.attributes = _attributes(device)
        self.kept: dict[str, object] = {}
        self.addresses: dict[str, int] = {}
        self.handle = ctypes.create_string_buffer(64)

    def address(self, name: str) -> int:
        """Where a function is; one that is not known does nothing and succeeds."""
        if name not in self.addresses:
            function = _FUNCTION(self.function(name))
            self.kept[name] = function
            self.addresses[name] = ctypes.cast(function, ctypes.c_void_p).value or 0
        return self.addresses[name]

    def function(self, name: str) -> Function:
        if name in _HANDLES:
            return self.give_handle
        known: dict[str, Function] = {
            "cuGetProcAddress": self.look_up,
            "cuGetProcAddress_v2": self.look_up,
            "cuGetExportTable": lambda *_: _NOT_FOUND,
            "cuGetErrorString": self.describe,
            "cuGetErrorName": self.describe,
            "cuDriverGetVersion": lambda to, *_: _write(to, 13000),
            "cuDeviceGetCount": lambda to, *_: _write(to, 1),
            "cuDeviceGet": lambda to, *_: _write(to, 0),
            "cuCtxGetDevice": lambda to, *_: _write(to, 0),
            "cuDeviceGetAttribute": lambda to, which, *_: _write(to, self.attributes.get(which & 0xFFFFFFFF, 0)),
            "cuKernelGetAttribute": lambda to, *_: _write(to, 0),
            "cuFuncGetAttribute": lambda to, *_: _write(to, 0),
        }
        return known.get(name, lambda *_: 0)

    def look_up(self, name: int, to: int, version: int, flags: int, status: int, _: int) -> int:
        del version, flags
        ctypes.c_uint64.from_address(to).value = self.address(ctypes.string_at(name).decode())
        return _write(status, 0) if status else 0

    def describe(self, _: int, to: int, *__: int) -> int:
        ctypes.c_uint64.from_address(to).value = ctypes.addressof(self.handle)
        return 0

    def give_handle(self, to: int, *_: int) -> int:
        ctypes.c_uint64.from_address(to).value = ctypes.addressof(self.handle)
        return 0


def _write(to: int, value: int) -> int:
    ctypes.c_int.from_address(to).value = value
    return 0


def _attributes(device: dict[str, int]) -> dict[int, int]:
    """``CUdevice_attribute`` by number, from cuDNN's description of a device."""
    threads = dict.fromkeys((1, 2, 3), 1024) | {4: 64, 5: 2**31 - 1, 6: 65535, 7: 65535, 10: 32}
    version = device["deviceVer"]
    return threads | {
        8: device["maxSharedMemoryPerBlock"], 12: device["regsPerBlock"], 13: device["smClockRateKHz"],
        16: device["multiProcessorCount"], 38: device["l2CacheSize"], 39: device["maxThreadsPerSM"],
        75: version // 100, 76: version // 10 % 10, 82: device["maxRegistersPerSM"],
        81: device["maxSharedMemoryPerBlockOptin"] + device["reservedSharedMemoryPerBlock"],
        97: device["maxSharedMemoryPerBlockOptin"], 106: device["maxCtasPerSM"],
        111: device["reservedSharedMemoryPerBlock"],
    }  # fmt: skip


def install(device: str) -> object:
    """Load the driver into this process, for every library that opens ``libcuda.so.1`` later.

    Args:
        device: cuDNN's description of the device, JSON.

    Returns:
        What must be kept as long as cuDNN is used.

    Raises:
        OSError: The machine or its system is not supported.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None or not hasattr(os, "memfd_create"):
        raise OSError(f"no stand-in driver for {platform.system()} on {platform.machine()}")
    file = os.memfd_create("libcuda")
    try:
        os.write(file, shared_library(_NAMES, machine))
        library = ctypes.CDLL(f"/proc/self/fd/{file}", mode=ctypes.RTLD_GLOBAL)
    finally:
        os.close(file)
    driver = _Driver(json.loads(device))
    slots = ctypes.addressof(ctypes.c_char.in_dll(library, _SLOTS))
    for i, name in enumerate(_NAMES):
        ctypes.c_uint64.from_address(slots + 8 * i).value = driver.address(name)
    return library, driver
