"""The options of PyTorch's CUDA caching allocator, and the sizes that follow from them.

Sources, here and in the other ``allocator*`` modules. ``cpp`` is PyTorch's
``c10/cuda/CUDACachingAllocator.cpp`` and ``config`` its ``c10/core/AllocatorConfig.{h,cpp}``, both at
v2.14.1 (commit 5c4886908584029761b579af026dcfb627c84070); ``cpp#L3705`` stands for
https://github.com/pytorch/pytorch/blob/v2.14.1/c10/cuda/CUDACachingAllocator.cpp#L3705. The text was
read at ROCm/pytorch@08b2238dae4ff76789018396755e731d05c9ac40 and pytorch/pytorch@001074d2; the lines in
2.14.1 come from a public index of that file and from the assertion texts in its binary, and what it does
differently from the pull requests named at the rule. ``calibration/allocator_differential.py`` checks
every rule against that binary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from fxmem.errors import UsageError

MIB = 2**20
MIN_BLOCK = 512
"""Every size is a multiple of this (``kMinBlockSize``, config.h)."""
SMALL_SIZE = 1 * MIB
"""The largest request served by the small pool (``kSmallSize``, config.h)."""
SMALL_SEGMENT = 2 * MIB
"""Segments of the small pool (``kSmallBuffer``, config.h)."""
MIN_LARGE_ALLOC = 10 * MIB
"""Requests from here on get a segment of their own size (``kMinLargeAlloc``, config.h)."""
ROUND_LARGE = 2 * MIB
"""... rounded up to this (``kRoundLarge``, config.h)."""
LARGE_SEGMENT = 20 * MIB
"""Default segment for large requests below ``MIN_LARGE_ALLOC`` (``large_segment_size_``, config.h)."""
INTERVALS = 16
"""Size intervals of ``roundup_power2_divisions``: 1 MiB, 2 MiB, ... 32 GiB and above (config.cpp)."""

_WHERE = "PYTORCH_ALLOC_CONF"


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorConfig:
    """What ``PYTORCH_ALLOC_CONF`` sets, as far as it decides about device memory. Sizes in bytes."""

    max_split_size: int | None = None
    """Blocks from this size on are never split; ``None``: all are."""
    garbage_collection_threshold: float | None = None
    """Share of the allowed memory above which old cached blocks are freed; needs ``per_process_memory_fraction``."""
    roundup_power2_divisions: tuple[int, ...] = (0,) * INTERVALS
    """Steps between two powers of two that a request is rounded up to, for each interval; 0 or 1: none."""
    expandable_segments: bool = False
    large_segment_size: int = LARGE_SEGMENT
    max_non_split_rounding: int | None = None
    """Waste accepted in a block that is not split; ``None``: ``large_segment_size``."""
    per_process_memory_fraction: float = 1.0
    """Share of the device that may be reserved."""
    throw_on_cudamalloc_oom: bool = False
    """Fail where the device is too small without releasing cached blocks first."""
    ties_by_address: bool = False
    """Whether equal free blocks are ordered by address alone, as before pytorch/pytorch#183591 (May 2026); since
    then by the order in which their segments were made. Not set by ``PYTORCH_ALLOC_CONF``."""

    def __post_init__(self) -> None:
        if self.large_segment_size <= MIN_LARGE_ALLOC:
            raise UsageError(f"large_segment_size must be above {MIN_LARGE_ALLOC >> 20} MiB", where=_WHERE)
        for name in ("max_split_size", "max_non_split_rounding"):
            value = getattr(self, name)
            if value is not None and value < self.large_segment_size:
                raise UsageError(f"{name} must be at least {self.large_segment_size >> 20} MiB", where=_WHERE)
        threshold = self.garbage_collection_threshold
        if threshold is not None and not 0.0 < threshold < 1.0:
            raise UsageError("garbage_collection_threshold must lie between 0 and 1", where=_WHERE)
        if not 0.0 <= self.per_process_memory_fraction <= 1.0:
            raise UsageError("per_process_memory_fraction must lie in [0, 1]", where=_WHERE)
        if len(self.roundup_power2_divisions) != INTERVALS:
            raise UsageError(f"roundup_power2_divisions takes {INTERVALS} values", where=_WHERE)

    @classmethod
    def parse(cls, text: str) -> AllocatorConfig:
        """Read the syntax of ``PYTORCH_ALLOC_CONF``.

        Args:
            text: ``key:value`` pairs with commas between them; empty means the defaults.

        Returns:
            The options that decide about device memory; known ones that do not are accepted and ignored.

        Raises:
            UsageError: An unknown key, or a value that PyTorch would refuse.

        >>> AllocatorConfig.parse("max_split_size_mb:128,expandable_segments:True").max_split_size
        134217728
        """
        config = cls()
        pairs = dict(_pairs(_tokens(text)))
        # The other limits are relative to the large segment, so that key is read first, wherever it
        # stands (config.cpp parseArgs; pytorch/pytorch#172056).
        for key in sorted(pairs, key=lambda name: name != "large_segment_size_mb"):
            if key not in _READERS and key not in _IGNORED:
                raise UsageError(f"unknown option {key!r}", where=_WHERE, hint=f"known: {', '.join(sorted(_READERS))}")
            if key in _READERS:
                config = _READERS[key](config, pairs[key])
        return config

    @property
    def non_split_rounding(self) -> int:
        """Waste accepted in a block that is not split (config.cpp parseArgs; pytorch/pytorch#136174)."""
        return self.large_segment_size if self.max_non_split_rounding is None else self.max_non_split_rounding

    @property
    def rounds_to_powers(self) -> bool:
        """Whether any interval rounds more coarsely than to 512 bytes."""
        return any(divisions > 1 for divisions in self.roundup_power2_divisions)

    def round_size(self, nbytes: int) -> int:
        """Size of the block that serves a request of ``nbytes`` (round_size, cpp#L3060).

        >>> AllocatorConfig().round_size(1)
        512
        """
        interval = min(max(nbytes.bit_length() - MIB.bit_length(), 0), INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 1 and nbytes > MIN_BLOCK * divisions:
            return _round_to_division(nbytes, divisions)
        return max(MIN_BLOCK, -(-nbytes // MIN_BLOCK) * MIN_BLOCK)

    def segment_size(self, size: int) -> int:
        """Size of the segment asked from the driver for a block of ``size`` (get_allocation_size, cpp#L3695)."""
        if size <= SMALL_SIZE:
            return SMALL_SEGMENT
        if size < MIN_LARGE_ALLOC:
            return self.large_segment_size
        return -(-size // ROUND_LARGE) * ROUND_LARGE


def _round_to_division(nbytes: int, divisions: int) -> int:
    """Round up to the next of ``divisions`` steps between powers of two (roundup_power2_next_division, cpp#L3040)."""
    floor = 1 << (nbytes.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    return -(-nbytes // step) * step


def _tokens(text: str) -> list[str]:
    """Cut at ``, : [ ]``; blanks do not count (ConfigTokenizer, config.h)."""
    for mark in ",:[]":
        text = text.replace(mark, f"\0{mark}\0")
    return [token for token in "".join(text.split()).split("\0") if token]


def _pairs(tokens: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Pair each key with the tokens of its value: one, or those between brackets."""
    at = 0
    while at < len(tokens):
        key, rest = tokens[at], tokens[at + 1 : at + 3]
        if len(rest) < 2 or rest[0] != ":" or rest[1] in ",:]":
            raise UsageError(f"{key!r} has no value", where=_WHERE, hint="write it as key:value,key:value")
        end = at + 3
        if rest[1] == "[":
            if "]" not in tokens[end:]:
                raise UsageError(f"the list of {key!r} is not closed", where=_WHERE)
            end = tokens.index("]", end) + 1
        yield key, tokens[at + 2 : end]
        if end < len(tokens) and tokens[end] != ",":
            raise UsageError(f"expected ',' after the value of {key!r}, found {tokens[end]!r}", where=_WHERE)
        at = end + 1


def _number(key: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{key}: {text!r} is not a whole number", where=_WHERE)
    return int(text)


def _power_of_two(key: str, text: str, *, or_zero: bool = False) -> int:
    value = _number(key, text)
    if value & (value - 1) or (value == 0 and not or_zero):
        raise UsageError(f"{key}: {value} is not a power of two", where=_WHERE)
    return value


def _size(field: str) -> Callable[[AllocatorConfig, list[str]], AllocatorConfig]:
    def read(config: AllocatorConfig, value: list[str]) -> AllocatorConfig:
        changes: dict[str, Any] = {field: _number(f"{field}_mb", value[0]) * MIB}
        return replace(config, **changes)

    return read


def _share(field: str) -> Callable[[AllocatorConfig, list[str]], AllocatorConfig]:
    def read(config: AllocatorConfig, value: list[str]) -> AllocatorConfig:
        try:
            changes: dict[str, Any] = {field: float(value[0])}
        except ValueError:
            raise UsageError(f"{field}: {value[0]!r} is not a number", where=_WHERE) from None
        return replace(config, **changes)

    return read


def _flag(field: str) -> Callable[[AllocatorConfig, list[str]], AllocatorConfig]:
    def read(config: AllocatorConfig, value: list[str]) -> AllocatorConfig:
        if value[0] not in ("True", "False"):
            raise UsageError(f"{field}: expected True or False, found {value[0]!r}", where=_WHERE)
        changes: dict[str, Any] = {field: value[0] == "True"}
        return replace(config, **changes)

    return read


def _backend(config: AllocatorConfig, value: list[str]) -> AllocatorConfig:
    if value[0] != "native":
        raise UsageError(f"backend {value[0]!r} is not modelled", where=_WHERE, hint="only native is")
    return config


def _divisions(config: AllocatorConfig, value: list[str]) -> AllocatorConfig:
    """Read one number for all sizes, or ``[MiB:divisions,...,>:divisions]`` (parseRoundUpPower2Divisions, config.cpp).

    A listed size sets the interval that it begins, the first one also all below; ``>`` sets all behind the last
    listed one. ``test_allocator_differential.py`` compares the outcome for odd lists with PyTorch's.
    """
    key = "roundup_power2_divisions"
    if value[0] != "[":
        return replace(config, roundup_power2_divisions=(_power_of_two(key, value[0]),) * INTERVALS)
    table = list(config.roundup_power2_divisions)
    last, is_first = 0, True
    items = "".join(value[1:-1]).removesuffix(",")
    for item in items.split(",") if items else ():
        size, colon, count = item.partition(":")
        if not colon:
            raise UsageError(f"{key}: {item!r} is not size:divisions", where=_WHERE)
        divisions = _power_of_two(key, count, or_zero=True)
        if size == ">":
            table[last + 1 :] = [divisions] * (INTERVALS - last - 1)
            continue
        last = min(_power_of_two(key, size).bit_length() - 1, INTERVALS - 1)
        if is_first:
            table[:last] = [divisions] * last
        table[last] = divisions
        is_first = False
    return replace(config, roundup_power2_divisions=tuple(table))


_READERS: dict[str, Callable[[AllocatorConfig, list[str]], AllocatorConfig]] = {
    "backend": _backend,
    "max_split_size_mb": _size("max_split_size"),
    "max_non_split_rounding_mb": _size("max_non_split_rounding"),
    "large_segment_size_mb": _size("large_segment_size"),
    "garbage_collection_threshold": _share("garbage_collection_threshold"),
    "per_process_memory_fraction": _share("per_process_memory_fraction"),
    "roundup_power2_divisions": _divisions,
    "expandable_segments": _flag("expandable_segments"),
    "throw_on_cudamalloc_oom": _flag("throw_on_cudamalloc_oom"),
}
_IGNORED = frozenset(
    {
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
    }
)
"""Pinned host memory, locking and graph capture: no effect on eager device memory (getKeys, CUDAAllocatorConfig.h)."""
