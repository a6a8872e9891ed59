"""What the workload runs on: a GPU of the table, or its rules with another capacity. No torch.

The table is ``data/devices.json``; each row says whence its figures come.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from fxmem.errors import UsageError
from fxmem.units import parse_size

_REFERENCE = "h200"
_LEAST_CAPACITY = 2**20
_ARCH = re.compile(r"sm_(\d{2,3})[af]?")
_CAPABILITIES = (50, 52, 53, 60, 61, 62, 70, 72, 75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)
"""NVIDIA's, from Maxwell on: https://developer.nvidia.com/cuda-gpus and nvcc 13.0 ``--list-gpu-arch``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, as far as it decides about memory.

    Raises:
        UsageError: ``arch`` is not written as ``sm_90``, or a size is out of range.
    """

    name: str
    """Key of the table (``a100-80gb``), the given size (``24GiB``), or whose rules count."""
    title: str
    arch: str
    """Compute capability: ``sm_90``."""
    capacity_bytes: int | None
    """``total_memory`` as the driver reports it; ``None``: no limit."""
    sm_count: int
    """Streaming multiprocessors: the grid of some kernels sizes their scratch memory."""
    context_bytes: int | None
    """CUDA context and loaded kernels, beside the allocator; ``None``: not known."""
    shared_memory: bool = False
    """Whether the host uses the same memory (Jetson)."""
    source: str = ""
    """Whence ``capacity_bytes`` comes."""
    context_source: str = ""
    """Whence ``context_bytes`` comes."""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        written = _ARCH.fullmatch(self.arch)
        if written is None:
            raise UsageError(f"{self.arch!r} is not an architecture", hint="write it as sm_90")
        if int(written[1]) not in _CAPABILITIES:
            known = ", ".join(map(str, _CAPABILITIES))
            raise UsageError(f"{self.arch!r} is no architecture of NVIDIA's", hint=f"those are sm_ with {known}")
        if self.capacity_bytes is not None and self.capacity_bytes < 1:
            raise UsageError(f"device {self.name}: a capacity must be positive")
        if self.context_bytes is not None and self.context_bytes < 0:
            raise UsageError(f"device {self.name}: a context cannot be negative")

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor number.

        >>> find_device("rtx-5090").compute_capability
        (12, 0)
        """
        digits = self.arch.removeprefix("sm_").rstrip("af")
        return int(digits[:-1]), int(digits[-1])


@functools.cache
def all_devices() -> tuple[Device, ...]:
    """The table, in its order: by architecture, then by class.

    >>> all_devices()[0].name
    'p100'
    """
    text = resources.files("fxmem").joinpath("data/devices.json").read_text(encoding="utf-8")
    return tuple(_device(row) for row in json.loads(text)["devices"])


def find_device(text: str | None = None, arch: str | None = None, context: int | None = None) -> Device:
    """Find a device by its name, or make one from a size.

    Args:
        text: ``h200``, ``RTX 4090``, ``NVIDIA A100-80GB``; or a capacity such as ``24GiB``;
            ``None`` for no limit.
        arch: Overrides the architecture (``sm_86``); with a size or alone it also picks the
            device whose other figures are used. Without it those are the H200's.
        context: Bytes; overrides the size of the CUDA context.

    Raises:
        UsageError: No such device, size or architecture.

    >>> find_device("24GiB", arch="sm_89").capacity_bytes
    25769803776
    """
    named = None if text is None else _by_name(text)
    if named is not None:
        device = named if arch is None else replace(named, arch=arch)
    elif text is None:
        device = _rules(arch, name=arch or _REFERENCE, capacity=None)
    elif text.strip()[:1].isdigit():
        device = _rules(arch, name=text.strip(), capacity=_capacity(text))
    else:
        raise _unknown(text)
    if context is None:
        return device
    return replace(device, context_bytes=context, context_source="given with --context")


def as_device(given: Device | str | None) -> Device:
    """What Python callers may give as ``device``.

    Args:
        given: A device, or what ``--device`` takes; ``None`` for the default, which has no limit.

    Raises:
        UsageError: It is neither, or no such device is known.
    """
    if given is None or isinstance(given, Device):
        return given or DEFAULT
    if not isinstance(given, str):
        hint = "give a name such as t4, a size such as 24GiB, or a fxmem.Device"
        raise UsageError(f"the device is {given!r}", where="device", hint=hint)
    return find_device(given)


def _device(row: Mapping[str, Any]) -> Device:
    return Device(**{**row, "aliases": tuple(row["aliases"])})


def _key(text: str) -> str:
    """A name without what people write differently: case, blanks, the maker and the series."""
    letters = re.sub(r"[\s_\-]+", "", text.lower())
    return re.sub(r"^(nvidia|tesla|geforce)+", "", letters)


def _by_name(text: str) -> Device | None:
    wanted = _key(text)
    for device in all_devices():
        if wanted in {_key(name) for name in (device.name, device.title, *device.aliases)}:
            return device
    return None


def _capacity(text: str) -> int:
    try:
        nbytes = parse_size(text)
    except UsageError:
        raise _unknown(text) from None
    if nbytes < _LEAST_CAPACITY:
        bare = text.strip()[-1:].isdigit() and nbytes
        hint = f"write the unit: {text.strip()}GiB" if bare else "give the memory of a GPU, such as 24GiB"
        raise UsageError(f"{text!r} is {nbytes} bytes", where="--device", hint=hint)
    return nbytes


def _rules(arch: str | None, *, name: str, capacity: int | None) -> Device:
    """A device that is only a capacity, with the other figures of a real one.

    Its context stays unknown: a measured one belongs to its own device.
    """
    reference = next(device for device in all_devices() if device.name == _REFERENCE)
    model = reference if arch is None else _largest(arch) or reference
    return Device(
        name=name,
        title=f"rules of {_REFERENCE if arch is None else arch}",
        arch=reference.arch if arch is None else arch,
        capacity_bytes=capacity,
        sm_count=model.sm_count,
        context_bytes=None,
        source="no limit" if capacity is None else "given as a size",
    )


def _largest(arch: str) -> Device | None:
    """The table's chip of an architecture with the most multiprocessors."""
    chips = [device for device in all_devices() if device.arch == arch]
    return max(chips, key=lambda device: device.sm_count, default=None)


def _unknown(text: str) -> UsageError:
    names = {_key(name): device.name for device in all_devices() for name in (device.name, *device.aliases)}
    close = dict.fromkeys(names[key] for key in difflib.get_close_matches(_key(text), names, n=3, cutoff=0.5))
    nearest = f"did you mean {', '.join(close)}? " if close else ""
    return UsageError(
        f"no device is called {text!r}",
        where="--device",
        hint=f"{nearest}`fxmem devices` lists the names; a size such as 24GiB works too",
    )


DEFAULT = find_device()
"""H200's rules without a limit."""
