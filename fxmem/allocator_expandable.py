"""Expandable segments: one growing range of addresses per pool, backed by memory page by page.

Only for a configuration with ``expandable_segments``: all blocks then belong to such segments.
For ``cpp#L...`` see :mod:`fxmem.allocator_config`.
"""

from __future__ import annotations

from bisect import bisect_left
from operator import attrgetter

from fxmem.allocator_blocks import Block, DeviceMemory, Pool, Segment
from fxmem.allocator_config import SMALL_SEGMENT

_by_address = attrgetter("address")


def best_fit(pool: Pool, size: int) -> Block | None:
    """The block to serve ``size`` from, by the size it can grow to (get_free_block, cpp#L3705).

    The search goes on while the next larger block can grow to less: a block at the growing end of a
    segment is kept back for what needs it.
    """
    at = pool.position(size)
    if at == len(pool):
        return None
    best = pool.at(at)
    for following in range(at + 1, len(pool)):
        block = pool.at(following)
        if _reach(block) >= _reach(best):
            break
        best = block
    return best


def grow(pool: Pool, size: int, page: int, device: DeviceMemory) -> Block | None:
    """A free, unlisted block of at least ``size`` from newly mapped memory (try_allocate_expandable_block, cpp#L3468).

    On failure, what was mapped on the way stays mapped and cached.
    """
    block = _room(pool, size, page, device)
    if not block.mapped and not _map(block, min(block.size, size), device):
        return None
    while block.size < size:
        # Free, then unmapped: mapping the neighbour merges the free block into it.
        unmapped = block.next
        assert unmapped is not None
        if not _map(unmapped, min(size - block.size, unmapped.size), device):
            return None
        block = unmapped
    pool.remove(block)
    return block


def release(pool: Pool, device: DeviceMemory) -> None:
    """Unmap every page that holds no block in use (release_blocks and release_expandable_segment, cpp#L4107)."""
    for block in pool.blocks():
        _unmap(block, device)
        if not block.is_split:
            pool.unmapped.remove(block)
            device.give_range(block.place, block.size)


def _reach(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


def _room(pool: Pool, size: int, page: int, device: DeviceMemory) -> Block:
    """The lowest address with ``size`` bytes of free or unmapped room behind it (find_expandable_block, cpp#L3344)."""
    for unmapped in pool.unmapped:
        before = unmapped.prev
        start = before if before is not None and not before.allocated else unmapped
        if _has_room(start, size):
            return start
    # The range is 1 1/8 of the device, in whole pages (ExpandableSegment's constructor).
    total = device.capacity_bytes if device.capacity_bytes is not None else device.UNLIMITED_RANGE
    length = -(-(total + total // 8) // page) * page
    segment = Segment(device.take_range(length), length, page)
    block = Block(segment.place, length, pool, segment)
    block.mapped = False
    _list_unmapped(pool, block)
    return block


def _has_room(start: Block, size: int) -> bool:
    room, block = 0, start
    while not block.allocated:
        room += block.size
        if room >= size or block.next is None:
            break
        block = block.next
    return room >= size


def _map(block: Block, size: int, device: DeviceMemory) -> bool:
    """Back the first ``size`` bytes of an unmapped block, rounded up to pages (map_block, cpp#L3393)."""
    segment, pool = block.segment, block.pool
    assert segment is not None
    pages = -(-size // segment.page)
    if not device.take(segment.page, pages):
        return False
    pool.unmapped.remove(block)
    block.mapped = True
    if pages * segment.page < block.size:
        rest = block.cut(pages * segment.page)
        rest.mapped = False
        _list_unmapped(pool, rest)
    _merge(block, block.prev)
    _merge(block, block.next)
    pool.insert(block)
    return True


def _unmap(block: Block, device: DeviceMemory) -> None:
    """Give back the whole pages inside a free block; what sticks out stays cached (unmap_block in cpp)."""
    segment, pool = block.segment, block.pool
    assert segment is not None
    offset = block.place - segment.place
    first = -(-offset // segment.page)
    last = (offset + block.size) // segment.page
    if first >= last:
        return
    pool.remove(block)
    if first * segment.page > offset:
        middle = block.cut(first * segment.page - offset)
        pool.insert(block)
        block = middle
    if block.size > (last - first) * segment.page:
        pool.insert(block.cut((last - first) * segment.page))
    block.mapped = False
    _merge(block, block.prev)
    _merge(block, block.next)
    _list_unmapped(pool, block)
    device.give(segment.page, last - first)


def _merge(block: Block, other: Block | None) -> None:
    """Take over a neighbour that is not in use and in the same state (try_merge_blocks, cpp#L3586)."""
    if other is None or other.allocated or other.mapped != block.mapped:
        return
    if other.mapped:
        block.pool.remove(other)
    else:
        block.pool.unmapped.remove(other)
    block.absorb(other)


def _list_unmapped(pool: Pool, block: Block) -> None:
    pool.unmapped.insert(bisect_left(pool.unmapped, block.address, key=_by_address), block)


def page_size(*, is_small: bool, large_segment_size: int) -> int:
    """Pages of 2 MiB for small blocks, of a large segment for large ones (find_expandable_block, cpp#L3344)."""
    return SMALL_SEGMENT if is_small else large_segment_size
