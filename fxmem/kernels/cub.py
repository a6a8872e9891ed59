"""Scratch memory of CUB's device-wide algorithms, in bytes.

Mirrors cub 3.0.1 as shipped with CUDA 13.0 (torch 2.14 names ``THRUST_300001`` in its symbols): the
``dispatch_*.cuh`` files give the sizes, ``tuning/tuning_*.cuh`` the tiles per architecture. torch calls
them from ATen/cuda/cub.cuh. ``OffsetT`` is 64-bit where torch passes an ``int64_t``.
"""

from __future__ import annotations

from fxmem.kernels.reduce import threads_per_sm
from fxmem.kernels.steps import Target

_SHARED = 48 * 1024
"""``max_smem_per_block`` (cub/util_arch.cuh)."""


def _div_up(a: int, b: int) -> int:
    return -(-a // b)


def _padded(nbytes: int) -> int:
    return _div_up(nbytes, 256) * 256


def alias(*sizes: int) -> int:
    """``AliasTemporaries`` (cub/util_temporary_storage.cuh): parts aligned to 256 bytes in one buffer."""
    return sum(_padded(size) for size in sizes) + 255


def bits_of(largest: int) -> int:
    """``get_num_bits`` (ATen/cuda/cub.h): bits that a sort has to look at for keys up to ``largest``."""
    return max(largest.bit_length(), 1)


# --------------------------------------------------------------------- tile states
def _tile_state(tiles: int, itemsize: int, *, primitive: bool = True) -> int:
    """``ScanTileState::AllocationSize`` (cub/agent/single_pass_scan_operators.cuh)."""
    states = 32 + tiles
    if primitive:
        word = {8: 16, 4: 8}.get(itemsize, 4)
        return alias(states * word, 0, 0)
    return alias(states * 4, states * itemsize, states * itemsize)


def _scaled(threads: int, items: int, itemsize: int, *, by_memory: bool) -> int:
    """Tile of ``MemBoundScaling`` or ``RegBoundScaling`` (cub/util_arch.cuh)."""
    scaled = min(items * 4 // itemsize, items * 2) if by_memory else items * 4 // max(4, itemsize)
    items = max(1, scaled)
    return items * min(threads, _div_up(_SHARED // (itemsize * items), 32) * 32)


def scan(count: int, itemsize: int, *, primitive: bool = True) -> int:
    """``DispatchScan`` with an operator of torch's own: no tuning knows it, so the default policy serves.

    Args:
        count: Elements.
        itemsize: Bytes of the accumulator.
        primitive: Whether it is a C++ number, which float16 and bfloat16 are not.
    """
    tile = _scaled(128, 15, itemsize, by_memory=True)
    return alias(_tile_state(_div_up(count, tile), itemsize, primitive=primitive))


def unique_by_key(count: int, itemsize: int, target: Target) -> int:
    """``DispatchUniqueByKey`` with keys and values of one integer type."""
    if target.sm >= 90:
        tile = {4: 512 * 14, 8: 448 * 11}[itemsize]
    elif target.sm == 80:
        tile = {4: 256 * 11, 8: 192 * 7}[itemsize]
    else:
        tile = 64 * {4: 11, 8: 5}[itemsize]
    return alias(_tile_state(_div_up(count, tile), 8), 0)


def scan_by_key(count: int, itemsize: int, target: Target) -> int:
    """``DispatchScanByKey`` with keys and values of one integer type, for a sum or a maximum."""
    tile = 256 * 9
    if target.sm >= 100:
        tile = {4: 224 * 20, 8: 256 * 23}[itemsize]
    elif target.sm >= 90:
        tile = {4: 288 * 14, 8: 224 * 11}[itemsize]
    elif target.sm == 80:
        tile = {4: 256 * 15, 8: 224 * 10}[itemsize]
    tiles = _div_up(count, tile)
    return alias((32 + tiles) * 16, itemsize * (tiles + 1))


# --------------------------------------------------------------------- sort
def radix_sort(count: int, key: int, value: int, bits: int, target: Target, *, floating: bool = False) -> int:
    """``DispatchRadixSort`` (dispatch_radix_sort.cuh) with a 64-bit count, input kept.

    Args:
        count: Elements.
        key: Bytes of a key.
        value: Bytes of a value; 0 for keys alone.
        bits: Bits sorted by.
        target: The GPU.
        floating: Whether keys are float32.
    """
    largest = max(key, value)
    if count <= 256 * max(1, 19 * 4 // max(4, largest)):
        return 1
    if key < 4 and target.sm < 90:
        return _radix_passes(count, key, value, target)
    threads, items = _onesweep(key, value, target, floating=floating)
    tile = _scaled(threads, items, largest, by_memory=False)
    passes = _div_up(bits, 8)
    portion = ((1 << 28) - 1) // tile * tile
    portions = _div_up(count, portion)
    blocks = _div_up(min(count, portion), tile)
    spare = count if passes > 1 else 0
    return alias(
        portions * passes * 256 * 8, blocks * 256 * 4, spare * key, spare * value, portions * passes * 4
    )  # fmt: skip


def _onesweep(key: int, value: int, target: Target, *, floating: bool) -> tuple[int, int]:
    """``OnesweepPolicy`` (tuning/tuning_radix_sort.cuh): threads, and items of four bytes per thread."""
    if target.sm >= 90:
        if key < 4:
            return (512, 23) if value == 8 else (512, 19)
        if key == 8:
            return 384, 30 if value < 8 else 24
        if not value:
            return 384, 19 - floating
        return 384, 17 if value < 8 else 29
    if target.sm >= 80:
        return 384, 17 if key == 4 and value else 21
    return 256, 46 if key == 4 and value == 4 else 23


def _radix_passes(count: int, key: int, value: int, target: Target) -> int:
    """``InvokePasses``: narrow keys before Hopper; a histogram of 128 digits per block of five waves."""
    blocks = target.sm_count * _blocks_per_sm(target) * 5
    spine = blocks * 128 + _scaled(512, 23, 8, by_memory=True)
    return alias(spine * 8, count * key, count * value)


# --------------------------------------------------------------------- reduce and select
def _blocks_per_sm(target: Target) -> int:
    """Blocks of 256 that fit by threads alone; registers may allow fewer, which only a GPU can tell."""
    return threads_per_sm(target.sm) // 256


def select_flagged(count: int, target: Target) -> int:
    """``DispatchSelectIf`` of 64-bit positions by flags, with a 32-bit count."""
    tile = 128 * 5
    if target.sm >= 100:
        tile = 320 * 11
    elif target.sm >= 90:
        tile = 384 * 11
    elif target.sm == 80:
        tile = 384 * 6
    return alias(_tile_state(_div_up(count, tile), 4), 0, 0)


def reduce(count: int, itemsize: int, target: Target) -> int:
    """``DispatchReduce``: a partial result for each of five waves of blocks, unless one tile is enough."""
    if count <= 256 * 16:
        return 1
    blocks = target.sm_count * _blocks_per_sm(target) * 5
    return alias(blocks * itemsize)
