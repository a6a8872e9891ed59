"""Replays allocations and frees by the rules of PyTorch's CUDA caching allocator.

:class:`CachingAllocator` is the allocator itself, :func:`replay` sends a tape through it. Not modelled,
because an eager single-GPU run does not need it: private pools (CUDA graphs, ``MemPool``), blocks held
back by ``record_stream``, several devices. For ``cpp#L...`` see :mod:`fxmem.allocator_config`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from fxmem import allocator_expandable as expandable
from fxmem.allocator_blocks import Block, DeviceMemory, Pool, SizeClass
from fxmem.allocator_config import MIN_BLOCK, SMALL_SIZE, AllocatorConfig
from fxmem.errors import OutOfMemoryError
from fxmem.tape import Demand, Tape
from fxmem.units import format_size

__all__ = ["AllocatorConfig", "Block", "CachingAllocator", "OutOfMemory", "Plan", "StepPeak", "replay", "shortage"]


class CachingAllocator:
    """The caching allocator of one device.

    Args:
        config: The options of ``PYTORCH_ALLOC_CONF``.
        capacity_bytes: What the device offers to the allocator; ``None``: without end.
        device: Replaces the device's memory; for replaying recorded addresses.
    """

    def __init__(
        self, config: AllocatorConfig, capacity_bytes: int | None = None, *, device: DeviceMemory | None = None
    ) -> None:
        self.allocated_bytes = 0
        """Sum of the sizes of all blocks in use, as ``torch.cuda.memory_allocated()`` counts."""
        self.requested_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_requested_bytes = 0
        self.retries = 0
        """``num_alloc_retries``."""
        self.ooms = 0
        """``num_ooms``: requests that failed after all retries."""
        self._config = config
        self._device = device or DeviceMemory(capacity_bytes, numbers_segments=not config.ties_by_address)
        self._small = SizeClass(is_small=True)
        self._large = SizeClass(is_small=False)
        self._expandable = config.expandable_segments
        self._rounds_to_powers = config.rounds_to_powers
        self._max_split = config.max_split_size
        # There is a limit only for a fraction below 1 (setMemoryFraction in cpp).
        capacity, fraction = self._device.capacity_bytes, config.per_process_memory_fraction
        self._limit = int(fraction * capacity) if capacity is not None and fraction < 1.0 else None
        # Rejecting looks at the same limit, or the whole device, but only after the limit was passed: it has an
        # effect for a fraction of 1 alone (alloc_block in cpp; pytorch/pytorch#179473).
        self._rejects = config.throw_on_cudamalloc_oom and capacity is not None
        # Garbage collection needs a threshold and a limit (malloc, cpp#L1720).
        self._gc_bytes: int | None = None
        if config.garbage_collection_threshold is not None and self._limit is not None:
            self._gc_bytes = int(config.garbage_collection_threshold * self._limit)

    @property
    def reserved_bytes(self) -> int:
        """Memory taken from the device, as ``torch.cuda.memory_reserved()`` counts."""
        return self._device.reserved_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that was reserved since the last :meth:`reset_peaks`."""
        return self._device.peak_reserved_bytes

    @property
    def cuda_mallocs(self) -> int:
        """Segments allocated, and stretches of expandable ones mapped (``num_device_alloc``)."""
        return self._device.allocs

    @property
    def cuda_frees(self) -> int:
        """Segments freed, and stretches of expandable ones unmapped (``num_device_free``)."""
        return self._device.frees

    def reset_peaks(self) -> None:
        """Let all peaks start again from the present level."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_requested_bytes = self.requested_bytes
        self._device.peak_reserved_bytes = self._device.reserved_bytes

    def malloc(self, nbytes: int, stream: int = 0) -> Block | None:
        """Serve a request (malloc and alloc_found_block, cpp#L1720).

        Args:
            nbytes: Bytes asked for; none take no block.
            stream: The stream that the memory is used on. Any number; 0 is the default stream.

        Returns:
            The block to hand to :meth:`free`, or ``None`` for no bytes.

        Raises:
            OutOfMemoryError: The device is full, also after all cached blocks were released.
        """
        if nbytes == 0:
            return None
        size = self._config.round_size(nbytes) if self._rounds_to_powers else (nbytes + MIN_BLOCK - 1) & -MIN_BLOCK
        size_class = self._small if size <= SMALL_SIZE else self._large
        pool = size_class.pool(stream)
        block = self._find(pool, size) or self._obtain(pool, size, nbytes)
        if block.size - size >= MIN_BLOCK and self._splits(block, size):
            pool.insert(block.cut(size))
        block.allocated = True
        block.requested = nbytes
        self.allocated_bytes += block.size
        self.requested_bytes += nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        return block

    def free(self, block: Block | None) -> None:
        """Return a block to its pool, merged with its free neighbours (free and free_block, cpp#L3502).

        Raises:
            ValueError: The block is not in use.
        """
        if block is None:
            return
        if not block.allocated:
            raise ValueError(f"{block!r} is not in use")
        block.allocated = False
        self.allocated_bytes -= block.size
        self.requested_bytes -= block.requested
        pool = block.pool
        before = block.prev
        if before is not None and not before.allocated and before.mapped:
            pool.remove(before)
            block.absorb(before)
        after = block.next
        if after is not None and not after.allocated and after.mapped:
            pool.remove(after)
            block.absorb(after)
        pool.insert(block)

    def empty_cache(self) -> None:
        """Give all cached memory that can be released back to the device (release_cached_blocks in cpp)."""
        for size_class in (self._large, self._small):
            for pool in size_class.pools.values():
                if self._expandable:
                    expandable.release(pool, self._device)
                    continue
                for block in pool.blocks():
                    if not block.is_split:
                        self._release(block)

    def _find(self, pool: Pool, size: int) -> Block | None:
        """Take the best fitting free block, if one may be used (get_free_block, cpp#L3705)."""
        if self._gc_bytes is not None:
            pool.size_class.searches += 1
        if self._expandable:
            block = expandable.best_fit(pool, size)
            if block is None:
                return None
        else:
            at = pool.position(size)
            if at == len(pool):
                return None
            block = pool.at(at)
        if self._max_split is not None and block.size >= self._max_split:
            # An oversize block serves no smaller request, and a large one only if little is wasted.
            wasteful = block.size >= size + self._config.non_split_rounding
            if size < self._max_split or wasteful:
                return None
        pool.remove(block)
        return block

    def _splits(self, block: Block, size: int) -> bool:
        """Whether the rest of a block is worth a block of its own (should_split, cpp#L3675).

        A rest of up to 1 MiB stays with a large block, and counts as allocated.
        """
        if block.pool.size_class.is_small or self._expandable:
            return True
        return block.size - size > SMALL_SIZE and (self._max_split is None or size < self._max_split)

    def _obtain(self, pool: Pool, size: int, nbytes: int) -> Block:
        """Get memory from the device, releasing what is cached step by step (malloc, cpp#L1720)."""
        self._collect_garbage()
        block = self._allocate(pool, size, nbytes)
        if block is None and self._release_oversize(pool, size):
            block = self._allocate(pool, size, nbytes)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._allocate(pool, size, nbytes)
        if block is None:
            self.ooms += 1
            raise self._out_of_memory(nbytes)
        return block

    def _allocate(self, pool: Pool, size: int, nbytes: int) -> Block | None:
        """Ask the device once (alloc_block in cpp)."""
        is_small = pool.size_class.is_small
        segment_size = self._config.segment_size(size)
        if self._limit is not None and self._device.reserved_bytes + segment_size > self._limit:
            return None
        if self._rejects and self._device.reserved_bytes + segment_size > (self._device.capacity_bytes or 0):
            raise self._out_of_memory(nbytes)
        if self._expandable:
            page = expandable.page_size(is_small=is_small, large_segment_size=self._config.large_segment_size)
            return expandable.grow(pool, size, page, self._device)
        place = self._device.malloc(segment_size)
        return None if place is None else Block(place, segment_size, pool)

    def _release(self, block: Block) -> None:
        """Free a whole segment (release_block, cpp#L4123)."""
        block.pool.remove(block)
        self._device.free(block.place, block.size)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Free oversize blocks, as few as make room for the request (release_available_cached_blocks, cpp#L4003)."""
        if self._max_split is None:
            return False
        wanted = max(size, self._max_split)
        at = pool.position(wanted)
        if at < len(pool) and not self._expandable:
            self._release(pool.at(at))
            return True
        if self._expandable:
            return False
        released = 0
        for block in reversed(pool.blocks()):
            if released >= wanted or block.size < self._max_split:
                break
            self._release(block)
            released += block.size
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Free cached segments of at least the mean age until below the threshold (garbage_collect_cached_blocks).

        A block's age is the number of searches since it was cached.
        """
        if self._gc_bytes is None or self._device.reserved_bytes <= self._gc_bytes or self._expandable:
            return
        to_reclaim = self._device.reserved_bytes - self._gc_bytes
        now = self._large.searches
        cached = [block for pool in self._large.pools.values() for block in pool.blocks() if not block.is_split]
        total_age = sum(now - block.born for block in cached)
        while to_reclaim > 0 and cached:
            mean_age = total_age / len(cached)
            old = [block for block in cached if now - block.born >= mean_age]
            if not old:
                return
            for block in old:
                to_reclaim -= block.size
                total_age -= now - block.born
                self._release(block)
            cached = [block for block in cached if now - block.born < mean_age]

    def _out_of_memory(self, nbytes: int) -> OutOfMemoryError:
        capacity = self._device.capacity_bytes if self._limit is None else self._limit
        return OutOfMemoryError(
            f"no room for {format_size(nbytes)}: {format_size(self.allocated_bytes)} allocated,"
            f" {format_size(self.reserved_bytes)} reserved of {format_size(capacity or 0)}",
            hint="take a smaller batch, or a device with more memory",
            requested_bytes=nbytes,
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            capacity_bytes=capacity or 0,
        )


class StepPeak(NamedTuple):
    """The peaks within one step, which starts at the level that the one before left."""

    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Where and why a replay ended early."""

    event: int
    """Index of the allocation that failed."""
    requested_bytes: int
    allocated_bytes: int
    """Allocated when it failed."""
    reserved_bytes: int
    """Still reserved then: what is in use, and what its segments hold beside it."""
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a tape needs of the device. After an OOM: up to the allocation that failed."""

    peak_allocated_bytes: int
    """Peak of ``torch.cuda.memory_allocated()`` over setup and steps."""
    peak_reserved_bytes: int
    """Peak of ``torch.cuda.memory_reserved()`` over setup and steps."""
    peak_event: int | None
    """Event at which the allocated peak is first reached; ``None`` where nothing is allocated."""
    reserved_at_peak_bytes: int
    """Reserved right after that event."""
    steps: tuple[StepPeak, ...]
    """Peaks of step 1, 2, ..."""
    block_bytes: tuple[int, ...]
    """Size of the block that served each storage; 0 where none did."""
    cuda_mallocs: int
    retries: int
    oom: OutOfMemory | None = None


def replay(run: Tape | Demand, config: AllocatorConfig, capacity_bytes: int | None = None) -> Plan:
    """Send a tape's allocations and frees through the caching allocator.

    Args:
        run: A whole run, or what it asks for.
        config: The allocator's options.
        capacity_bytes: What the device offers to the allocator; ``None``: without end.

    Returns: the plan; where the device is too small, its ``oom`` says so.
    """
    allocator = CachingAllocator(config, capacity_bytes)
    asked = run.demand if isinstance(run, Tape) else run
    going = _Run(asked.events, asked.requests, allocator)
    sections: list[StepPeak] = []
    for start, stop in pairwise((0, *asked.step_starts, len(asked.events))):
        allocator.reset_peaks()
        going.advance(start, stop)
        sections.append(StepPeak(allocator.peak_allocated_bytes, allocator.peak_reserved_bytes))
        if going.oom is not None:
            break
    return Plan(
        peak_allocated_bytes=going.peak_bytes,
        peak_reserved_bytes=max(section.reserved_bytes for section in sections),
        peak_event=going.peak_event,
        reserved_at_peak_bytes=going.reserved_at_peak_bytes,
        steps=tuple(sections[1:]),
        block_bytes=tuple(going.block_bytes),
        cuda_mallocs=allocator.cuda_mallocs,
        retries=allocator.retries,
        oom=going.oom,
    )


def shortage(
    events: Sequence[int], requests: Sequence[tuple[int, int]], config: AllocatorConfig, capacity_bytes: int
) -> OutOfMemory | None:
    """Ask only whether sizes fit: a replay without a tape.

    Args:
        events: As in :attr:`Tape.events`.
        requests: Bytes and stream of each storage.
        config: The allocator's options.
        capacity_bytes: What the device offers to the allocator.

    Returns:
        Where the device is too small; ``None`` where it never is.
    """
    run = _Run(events, requests, CachingAllocator(config, capacity_bytes))
    run.advance(0, len(events))
    return run.oom


class _Run:
    """A replay on its way: which block serves which storage, and the peak so far."""

    def __init__(self, events: Sequence[int], requests: Sequence[tuple[int, int]], allocator: CachingAllocator) -> None:
        self.peak_bytes = 0
        self.peak_event: int | None = None
        self.reserved_at_peak_bytes = 0
        self.block_bytes = [0] * len(requests)
        self.oom: OutOfMemory | None = None
        self._blocks: list[Block | None] = [None] * len(requests)
        self._requests = requests
        self._events = events
        self._allocator = allocator

    def advance(self, start: int, stop: int) -> None:
        """Replay the events [start, stop), or up to an allocation that fails."""
        allocator, blocks = self._allocator, self._blocks
        for index in range(start, stop):
            event = self._events[index]
            if event < 0:
                allocator.free(blocks[~event])
                continue
            try:
                block = blocks[event] = allocator.malloc(*self._requests[event])
            except OutOfMemoryError as error:
                self.oom = OutOfMemory(
                    event=index, requested_bytes=error.requested_bytes, allocated_bytes=error.allocated_bytes,
                    reserved_bytes=error.reserved_bytes, capacity_bytes=error.capacity_bytes,
                )  # fmt: skip
                return
            if block is not None:
                self.block_bytes[event] = block.size
                if allocator.allocated_bytes > self.peak_bytes:
                    self.peak_bytes, self.peak_event = allocator.allocated_bytes, index
                    self.reserved_at_peak_bytes = allocator.reserved_bytes
