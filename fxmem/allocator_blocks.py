"""The pieces the caching allocator works on: blocks, free lists, and the device's own memory.

A segment is what the driver handed out; blocks tile it, linked to their neighbours. A block is
in use, or free and then in the :class:`Pool` of its size class and stream.
For ``cpp#L...`` see :mod:`fxmem.allocator_config`.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from fxmem.allocator_config import MIB

GRANULARITY = 2 * MIB
"""The driver gives memory in pages of 2 MiB (pytorch/pytorch#17120)."""
_ADDRESS_BITS = 48
_PLACE_BITS = 96


class Block:
    """A stretch of a segment: in use, free, or (expandable segments) not backed by memory.

    ``place`` is the number of its segment, in the order in which segments were made, above its address:
    among free blocks of one size the lowest is taken.
    """

    __slots__ = ("allocated", "born", "mapped", "next", "place", "pool", "prev", "requested", "segment", "size")

    def __init__(self, place: int, size: int, pool: Pool, segment: Segment | None = None) -> None:
        self.place = place
        self.size = size
        self.pool = pool
        self.segment = segment
        self.requested = 0
        self.allocated = False
        self.mapped = True
        self.born = 0
        self.prev: Block | None = None
        self.next: Block | None = None

    def __repr__(self) -> str:
        state = "used" if self.allocated else "free" if self.mapped else "unmapped"
        return f"Block({self.address:#x}, {self.size}, {state})"

    @property
    def address(self) -> int:
        """Where it begins on the device."""
        return self.place & ((1 << _ADDRESS_BITS) - 1)

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None

    def cut(self, size: int) -> Block:
        """Shorten to ``size`` and return the rest as a new, unlisted block behind it."""
        rest = Block(self.place + size, self.size - size, self.pool, self.segment)
        self.size = size
        rest.prev = self
        after = rest.next = self.next
        if after is not None:
            after.prev = rest
        self.next = rest
        return rest

    def absorb(self, other: Block) -> None:
        """Take over an unlisted neighbour's stretch."""
        self.size += other.size
        if self.prev is other:
            self.place = other.place
            before = self.prev = other.prev
            if before is not None:
                before.next = self
        else:
            after = self.next = other.next
            if after is not None:
                after.prev = self


class SizeClass:
    """The small or the large blocks, one pool a stream (BlockPool; blocks never change streams)."""

    __slots__ = ("is_small", "pools", "searches")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.pools: dict[int, Pool] = {}
        self.searches = 0
        """Counted only for garbage collection: the clock that tells a block's age (get_free_block, cpp#L3705)."""

    def pool(self, stream: int) -> Pool:
        """The pool of a stream, made at its first request."""
        pool = self.pools.get(stream)
        if pool is None:
            pool = self.pools[stream] = Pool(self)
        return pool


class Pool:
    """The free blocks of one size class on one stream, in the order of best fit.

    The order is (size, number of the segment, address) (BlockComparatorSizeCounterAddress, cpp#L1120;
    pytorch/pytorch#183591). A key packs the three into an ``int``, which compares fastest.
    """

    __slots__ = ("_blocks", "_keys", "size_class", "unmapped")

    def __init__(self, size_class: SizeClass) -> None:
        self.size_class = size_class
        self.unmapped: list[Block] = []
        """Stretches of expandable segments without memory, by address."""
        self._keys: list[int] = []
        self._blocks: dict[int, Block] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def insert(self, block: Block) -> None:
        """List a free block."""
        key = block.size << _PLACE_BITS | block.place
        insort(self._keys, key)
        self._blocks[key] = block
        block.born = self.size_class.searches

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        key = block.size << _PLACE_BITS | block.place
        del self._blocks[key]
        del self._keys[bisect_left(self._keys, key)]

    def position(self, size: int) -> int:
        """Index of the first block of at least ``size``; the number of blocks if there is none."""
        return bisect_left(self._keys, size << _PLACE_BITS)

    def at(self, position: int) -> Block:
        """The block at an index of the order."""
        return self._blocks[self._keys[position]]

    def blocks(self) -> list[Block]:
        """All free blocks in order, as a list of its own."""
        return [self._blocks[key] for key in self._keys]


class Segment:
    """An expandable segment: a range of addresses, backed by memory page by page."""

    __slots__ = ("page", "place", "size")

    def __init__(self, place: int, size: int, page: int) -> None:
        self.place = place
        self.size = size
        self.page = page


class DeviceMemory:
    """What the driver hands out, what of it the allocator holds, and the counts that PyTorch keeps of both.

    Addresses: the lowest free range that is long enough. A driver may choose others; that changes a result only
    with ``ties_by_address``, or where a pool has several expandable segments.

    Args:
        capacity_bytes: Memory that the device offers to the allocator; ``None``: without end.
        numbers_segments: Whether blocks of equal size are ordered by segment before address.
    """

    UNLIMITED_RANGE = 2**40
    """Stands for the device's size where an address range must be sized without a capacity."""

    def __init__(self, capacity_bytes: int | None, *, numbers_segments: bool = True) -> None:
        self.capacity_bytes = capacity_bytes
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.allocs = 0
        """Segments allocated and stretches mapped (``num_device_alloc``)."""
        self.frees = 0
        self._used = 0
        self._step = 1 if numbers_segments else 0
        self._number = 0
        self._holes: list[tuple[int, int]] = []
        """Free ranges (start, stop) below the highest range in use."""
        self._top = GRANULARITY

    def malloc(self, nbytes: int) -> int | None:
        """``cudaMalloc``: the place of a new segment, or ``None`` where the device is full."""
        return self.take_range(nbytes) if self.take(nbytes) else None

    def free(self, place: int, nbytes: int) -> None:
        """``cudaFree``."""
        self.give(nbytes)
        self.give_range(place, nbytes)

    def take(self, nbytes: int, pages: int = 1) -> bool:
        """Back ``pages`` times ``nbytes`` with memory, or nothing at all (ExpandableSegment::map, cpp#L446)."""
        used = _whole_pages(nbytes) * pages
        if self.capacity_bytes is not None and self._used + used > self.capacity_bytes:
            return False
        self._used += used
        self.allocs += 1
        self.reserved_bytes += nbytes * pages
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def give(self, nbytes: int, pages: int = 1) -> None:
        """Return memory to the device."""
        self._used -= _whole_pages(nbytes) * pages
        self.frees += 1
        self.reserved_bytes -= nbytes * pages

    def take_range(self, nbytes: int) -> int:
        """The place of a new range of addresses, with the next segment's number."""
        length = _whole_pages(nbytes)
        self._number += self._step
        for index, (start, stop) in enumerate(self._holes):
            if stop - start >= length:
                self._holes[index : index + 1] = [(start + length, stop)] if stop - start > length else []
                break
        else:
            start, self._top = self._top, self._top + length
        return self._number << _ADDRESS_BITS | start

    def give_range(self, place: int, nbytes: int) -> None:
        """Let a range of addresses be used again."""
        start = place & ((1 << _ADDRESS_BITS) - 1)
        stop = start + _whole_pages(nbytes)
        index = bisect_left(self._holes, (start, stop))
        if index < len(self._holes) and self._holes[index][0] == stop:
            stop = self._holes.pop(index)[1]
        if index > 0 and self._holes[index - 1][1] == start:
            index -= 1
            start = self._holes.pop(index)[0]
        if stop == self._top:
            self._top = start
        else:
            self._holes.insert(index, (start, stop))


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // GRANULARITY) * GRANULARITY
