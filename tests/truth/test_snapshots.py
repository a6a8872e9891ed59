"""Replays memory histories recorded on real GPUs: every block and every segment at its place and size.

The recordings (``snapshots/README.md``) come from PyTorch versions that break ties by address. Where a
new segment lies is the driver's choice, so addresses of segments are given; everything else must follow.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fxmem.allocator import AllocatorConfig, Block, CachingAllocator
from fxmem.allocator_blocks import DeviceMemory
from fxmem.allocator_config import SMALL_SIZE

SNAPSHOTS = Path(__file__).parent / "snapshots"
TRACES = ("trace03", "trace06", "trace12", "trace20", "trace24")


class RecordedDevice(DeviceMemory):
    """Gives each new segment the address that the recording says comes next."""

    def __init__(self) -> None:
        super().__init__(None, numbers_segments=False)
        self.due: list[tuple[int, int]] = []
        self.released: list[tuple[int, int]] = []

    def malloc(self, nbytes: int) -> int | None:
        assert self.due, f"the model takes a segment of {nbytes} bytes where PyTorch took none"
        address, size = self.due.pop(0)
        assert size == nbytes
        assert self.take(nbytes)
        return address

    def free(self, place: int, nbytes: int) -> None:
        self.give(nbytes)
        self.released.append((place, nbytes))


@dataclass
class Start:
    """The state before the first event, found by undoing the events from the final map."""

    segments: dict[tuple[int, int], tuple[int, bool]]
    """(address, size) -> (stream, small)."""
    blocks: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Blocks in use: address -> (size, requested size)."""


def undo(recording: dict[str, Any]) -> Start:
    events = recording["events"]
    segments = {
        (segment["address"], segment["total_size"]): (segment["stream"], segment["type"] == "small")
        for segment in recording["segments_at_end"]
    }
    sizes = {block[0]: block[1] for segment in recording["segments_at_end"] for block in segment["blocks"]}
    live: dict[int, int | None] = {
        block[0]: block[2]
        for segment in recording["segments_at_end"]
        for block in segment["blocks"]
        if block[3] == "active_allocated"
    }
    ever_freed: set[int] = set()
    for action, address, size, stream in reversed(events):
        match action:
            case "segment_alloc":
                del segments[address, size]
            case "segment_free":
                segments[address, size] = (stream, size == 2 << 20)
            case "alloc":
                del live[address]
            case "free_requested":
                live[address] = size
                ever_freed.add(address)
    start = Start(segments)
    for address, requested in live.items():
        assert requested is not None
        # A block in use through all events has its size in the final map.
        size = sizes[address] if address not in ever_freed else 0
        start.blocks[address] = (size, requested)
    _find_sizes(start, events)
    return start


def _find_sizes(start: Start, events: list[list[Any]]) -> None:
    """Sizes of blocks that were freed: the request rounded up, or up to 1 MiB more in a large segment.

    Such a block had no free block behind it when it was made, so it ends where the next one begins: a block
    in use from the start, one made behind it in its lifetime, or the segment's end.
    """
    ends = sorted([address for address, _ in start.segments] + [a + s for a, s in start.segments])
    small = sorted((a, s) for (a, s), (_, is_small) in start.segments.items() if is_small)
    freed_at: dict[int, int] = {}
    made: dict[int, int] = {}
    for index, (action, address, _, _) in enumerate(events):
        if action == "free_requested":
            freed_at.setdefault(address, index)
        elif action == "alloc":
            made.setdefault(address, index)
    borders = sorted({*start.blocks, *made, *ends})
    for address, (size, requested) in start.blocks.items():
        if size:
            continue
        size = -(-requested // 512) * 512
        at = bisect_left(small, (address + 1, 0)) - 1
        in_small = at >= 0 and small[at][0] <= address < sum(small[at])
        for border in borders[bisect_left(borders, address + size) :]:
            if in_small or border - address - size > SMALL_SIZE:
                break
            if border in start.blocks or border not in made or made[border] < freed_at[address]:
                size = border - address
                break
        start.blocks[address] = (size, requested)


def build(start: Start, allocator: CachingAllocator, device: RecordedDevice) -> dict[int, Block]:
    """Put an allocator into a state; return the blocks in use by address."""
    in_use: dict[int, Block] = {}
    addresses = sorted(start.blocks)
    for (address, size), (stream, is_small) in start.segments.items():
        assert device.take(size)
        pool = (allocator._small if is_small else allocator._large).pool(stream)
        rest: Block | None = Block(address, size, pool)
        for at in addresses[bisect_left(addresses, address) : bisect_left(addresses, address + size)]:
            assert rest is not None
            if at > rest.address:
                gap, rest = rest, rest.cut(at - rest.address)
                pool.insert(gap)
            block, length = rest, start.blocks[at][0]
            rest = block.cut(length) if length < block.size else None
            block.allocated, block.requested = True, start.blocks[at][1]
            allocator.allocated_bytes += block.size
            in_use[at] = block
        if rest is not None:
            pool.insert(rest)
    assert len(in_use) == len(start.blocks)
    return in_use


def replay_events(
    events: list[list[Any]], allocator: CachingAllocator, device: RecordedDevice, in_use: dict[int, Block]
) -> None:
    released: set[tuple[int, int]] = set()
    for index, (action, address, size, stream) in enumerate(events):
        where = f"event {index}: {action} {size} at {address:#x}"
        if action == "segment_free":
            released.add((address, size))
            if events[index + 1][0] != "segment_free":
                # A retry, or a call of empty_cache: all segments without a block in use go.
                device.released.clear()
                allocator.empty_cache()
                assert set(device.released) == released, where
                released.clear()
        elif action == "segment_alloc":
            device.due.append((address, size))
        elif action == "alloc":
            block = allocator.malloc(size, stream)
            assert block is not None
            assert block.address == address, f"{where}, the model has {block}"
            assert not device.due, f"{where}: PyTorch took a segment, the model did not"
            in_use[address] = block
        elif action == "free_requested":
            allocator.free(in_use.pop(address))


def final_map(allocator: CachingAllocator, in_use: dict[int, Block]) -> dict[int, tuple[int, bool]]:
    """All blocks: address -> (size, in use)."""
    found = {address: (block.size, True) for address, block in in_use.items()}
    for size_class in (allocator._small, allocator._large):
        for pool in size_class.pools.values():
            found |= {block.address: (block.size, False) for block in pool.blocks()}
    return found


@pytest.mark.parametrize("name", TRACES)
def test_recording_replays_block_by_block(name: str) -> None:
    recording = json.loads(gzip.decompress((SNAPSHOTS / f"{name}.json.gz").read_bytes()))
    device = RecordedDevice()
    allocator = CachingAllocator(AllocatorConfig(ties_by_address=True), device=device)
    in_use = build(undo(recording), allocator, device)

    replay_events(recording["events"], allocator, device, in_use)

    assert final_map(allocator, in_use) == {
        address: (size, state == "active_allocated")
        for segment in recording["segments_at_end"]
        for address, size, _, state in segment["blocks"]
    }
    assert allocator.reserved_bytes == sum(segment["total_size"] for segment in recording["segments_at_end"])
