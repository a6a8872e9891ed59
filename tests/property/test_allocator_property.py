"""What holds for the caching allocator whatever is asked of it."""

from __future__ import annotations

from itertools import accumulate, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tapes import TapeBuilder

from fxmem.allocator import AllocatorConfig, Block, CachingAllocator, replay
from fxmem.errors import OutOfMemoryError
from fxmem.tape import Tape

MIB = 2**20
OPTIONS = st.sampled_from(
    [
        "",
        "max_split_size_mb:20",
        "max_split_size_mb:32,max_non_split_rounding_mb:40",
        "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
        "roundup_power2_divisions:[1:2,8:4,>:8]",
        "large_segment_size_mb:64",
        "expandable_segments:True",
        "expandable_segments:True,max_split_size_mb:32,per_process_memory_fraction:0.8",
    ]
)
EDGES = st.sampled_from([512, MIB, 2 * MIB, 10 * MIB, 20 * MIB, 32 * MIB])
SIZES = st.one_of(
    st.integers(1, 4096), st.integers(1, 64 * MIB), st.builds(lambda edge, off: edge + off, EDGES, st.integers(-1, 1))
)


def attempt(allocator: CachingAllocator, nbytes: int, stream: int) -> Block | None:
    try:
        return allocator.malloc(nbytes, stream)
    except OutOfMemoryError:
        return None


@st.composite
def tapes(draw: st.DrawFn) -> Tape:
    """Some tensors kept, then steps that make tensors and free any that are alive."""
    builder, live, count = TapeBuilder(), [], 0
    for step in range(draw(st.integers(1, 4))):
        if step:
            builder.step()
        for nbytes, frees in draw(st.lists(st.tuples(SIZES, st.lists(st.integers(0, 99), max_size=2)), max_size=12)):
            builder.op("make", makes={f"t{count}": (nbytes,)}, dtype="uint8")
            live.append(f"t{count}")
            count += 1
            builder.free(*[live.pop(at % len(live)) for at in frees if live])
    return builder.build()


class AllocatorMachine(RuleBasedStateMachine):
    """Random requests on up to three streams, on a small, a large or an endless device."""

    @initialize(options=OPTIONS, capacity_mib=st.sampled_from([64, 200, 1000, None]))
    def start(self, options, capacity_mib):
        self.capacity = None if capacity_mib is None else capacity_mib * MIB
        config = AllocatorConfig.parse(options)
        self.allowed = self.capacity
        if self.capacity is not None and not config.expandable_segments:
            # With expandable segments PyTorch checks the fraction against less than it then maps, and may exceed it.
            self.allowed = int(self.capacity * config.per_process_memory_fraction)
        self.allocator = CachingAllocator(config, self.capacity)
        self.twin = CachingAllocator(config, self.capacity)
        self.live: list[tuple[Block, Block, int]] = []

    @rule(nbytes=SIZES, stream=st.integers(0, 2))
    def malloc(self, nbytes, stream):
        block, twin = attempt(self.allocator, nbytes, stream), attempt(self.twin, nbytes, stream)
        if block is None:
            assert twin is None
            assert self.capacity is not None
            return
        assert block.size >= nbytes
        assert block.size % 512 == 0
        self.live.append((block, twin, nbytes))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        block, twin, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.allocator.free(block)
        self.twin.free(twin)

    @rule()
    def empty_cache(self):
        self.allocator.empty_cache()
        self.twin.empty_cache()

    @invariant()
    def live_blocks_never_overlap(self):
        ranges = sorted((block.address, block.address + block.size) for block, _, _ in self.live)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(ranges))

    @invariant()
    def sums_agree(self):
        assert self.allocator.allocated_bytes == sum(block.size for block, _, _ in self.live)
        assert self.allocator.requested_bytes == sum(nbytes for _, _, nbytes in self.live)
        assert self.allocator.reserved_bytes >= self.allocator.allocated_bytes >= self.allocator.requested_bytes
        assert self.allowed is None or self.allocator.reserved_bytes <= self.allowed

    @invariant()
    def is_deterministic(self):
        assert [block.place for block, _, _ in self.live] == [twin.place for _, twin, _ in self.live]
        assert self.allocator.reserved_bytes == self.twin.reserved_bytes
        assert self.allocator.retries == self.twin.retries

    def teardown(self):
        if not hasattr(self, "allocator"):
            return
        for block, _, _ in self.live:
            self.allocator.free(block)
        assert (self.allocator.allocated_bytes, self.allocator.requested_bytes) == (0, 0)
        self.allocator.empty_cache()
        assert self.allocator.reserved_bytes == 0


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestAllocator = AllocatorMachine.TestCase


@settings(max_examples=60, deadline=None)
@given(tape=tapes(), options=OPTIONS)
def test_plan_agrees_with_a_plain_count(tape, options):
    plan = replay(tape, AllocatorConfig.parse(options))

    level, levels = 0, []
    for event in tape.events:
        level += plan.block_bytes[event] if event >= 0 else -plan.block_bytes[~event]
        levels.append(level)
    assert plan.peak_allocated_bytes == max(levels, default=0)
    assert plan.peak_event == (levels.index(max(levels)) if any(levels) else None)
    for step, (start, stop) in zip(plan.steps, pairwise((*tape.step_starts, len(levels))), strict=True):
        before = levels[start - 1] if start else 0
        assert step.allocated_bytes == max([before, *levels[start:stop]])
        assert step.reserved_bytes >= step.allocated_bytes
    assert all(block >= storage.nbytes for block, storage in zip(plan.block_bytes, tape.storages, strict=True))
    assert plan.peak_reserved_bytes >= plan.reserved_at_peak_bytes >= plan.peak_allocated_bytes
    assert plan == replay(tape, AllocatorConfig.parse(options))


@settings(max_examples=60, deadline=None)
@given(tape=tapes(), options=OPTIONS.filter(lambda options: "fraction" not in options and "expand" not in options))
def test_a_device_as_large_as_the_reserved_peak_is_enough(tape, options):
    # Expandable segments are left out: a small device gives them a short range of addresses.
    config = AllocatorConfig.parse(options)
    plan = replay(tape, config)
    assert replay(tape, config, plan.peak_reserved_bytes) == plan
    # What is requested is needed anywhere; what is allocated is not: a small device gives too large blocks back.
    sizes = [tape.storages[event].nbytes if event >= 0 else -tape.storages[~event].nbytes for event in tape.events]
    requested = max(accumulate(sizes), default=0)
    if requested:
        assert replay(tape, config, requested - 1).oom is not None
