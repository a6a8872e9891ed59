"""Each rule of the caching allocator on a trace small enough to follow by hand."""

from __future__ import annotations

import pytest
from tapes import TapeBuilder

from fxmem.allocator import AllocatorConfig, CachingAllocator, StepPeak, replay
from fxmem.errors import OutOfMemoryError, UsageError

KIB, MIB = 2**10, 2**20


def make(options: str = "", capacity_mib: int | None = None) -> CachingAllocator:
    capacity = None if capacity_mib is None else capacity_mib * MIB
    return CachingAllocator(AllocatorConfig.parse(options), capacity)


class TestSizes:
    @pytest.mark.parametrize(
        ("nbytes", "block", "segment"),
        [
            (1, 512, 2 * MIB),
            (512, 512, 2 * MIB),
            (513, 1024, 2 * MIB),
            (MIB, MIB, 2 * MIB),
            (MIB + 1, MIB + 512, 20 * MIB),
            (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
            # From 10 MiB on a segment of its own; a rest of up to 1 MiB stays with the block and counts as allocated.
            (10 * MIB, 10 * MIB, 10 * MIB),
            # Here the rest of 2 MiB - 512 is above 1 MiB, so it is split off.
            (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
            (15 * MIB, 16 * MIB, 16 * MIB),
        ],
    )
    def test_block_and_segment(self, nbytes, block, segment):
        allocator = make()
        allocator.malloc(nbytes)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (block, segment)
        assert allocator.requested_bytes == nbytes

    def test_nothing_takes_no_block(self):
        allocator = make()
        assert allocator.malloc(0) is None
        allocator.free(None)
        assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.cuda_mallocs) == (0, 0, 0)

    @pytest.mark.parametrize(
        ("options", "nbytes", "size"),
        [
            # Between 1024 and 2048 with 4 divisions: 1280, 1536, 1792. Not below 512 * 4.
            ("roundup_power2_divisions:4", 1200 * MIB, 1280 * MIB),
            ("roundup_power2_divisions:4", 2048, 2048),
            ("roundup_power2_divisions:4", 2049, 2560),
            ("roundup_power2_divisions:4", 1100, 1536),
            ("roundup_power2_divisions:1", 1200 * MIB + 1, 1200 * MIB + 512),
            # The first listed size also sets all below it, ">" all behind the last.
            ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 300 * MIB + 1, 300 * MIB + 512),
            ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 520 * MIB, 768 * MIB),
            ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 1025 * MIB, 1280 * MIB),
            ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 2049 * MIB, 2304 * MIB),
            ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", 100_000 * MIB, 106_496 * MIB),
        ],
    )
    def test_round_to_powers(self, options, nbytes, size):
        assert AllocatorConfig.parse(options).round_size(nbytes) == size


class TestPools:
    def test_small_requests_share_a_segment(self):
        allocator = make()
        for _ in range(4):
            allocator.malloc(512 * KIB)
        assert (allocator.reserved_bytes, allocator.cuda_mallocs) == (2 * MIB, 1)
        allocator.malloc(1)
        assert (allocator.reserved_bytes, allocator.cuda_mallocs) == (4 * MIB, 2)

    def test_small_and_large_do_not_mix(self):
        allocator = make()
        allocator.free(allocator.malloc(4 * MIB))
        allocator.malloc(1)
        assert allocator.reserved_bytes == 22 * MIB

    def test_streams_do_not_mix(self):
        allocator = make()
        allocator.free(allocator.malloc(4 * MIB, stream=0))
        allocator.malloc(4 * MIB, stream=7)
        assert allocator.reserved_bytes == 40 * MIB
        allocator.malloc(4 * MIB, stream=0)
        assert allocator.reserved_bytes == 40 * MIB

    def test_best_fit(self):
        allocator = make()
        wide, narrow = allocator.malloc(40 * MIB), allocator.malloc(30 * MIB)
        allocator.free(wide)
        allocator.free(narrow)
        block = allocator.malloc(20 * MIB)
        assert block.address == narrow.address

    def test_ties_go_to_the_older_segment(self):
        # The segment made last lies lowest, in the hole that the first one left.
        for options, expected in ((AllocatorConfig(), "older"), (AllocatorConfig(ties_by_address=True), "lower")):
            allocator = CachingAllocator(options)
            hole, older = allocator.malloc(30 * MIB), allocator.malloc(30 * MIB)
            allocator.free(hole)
            allocator.empty_cache()
            lower = allocator.malloc(30 * MIB)
            assert lower.address < older.address
            allocator.free(older)
            allocator.free(lower)
            block = allocator.malloc(30 * MIB)
            assert block.address == {"older": older, "lower": lower}[expected].address

    def test_a_freed_block_merges_with_both_neighbours(self):
        allocator = make()
        blocks = [allocator.malloc(5 * MIB) for _ in range(4)]
        for block in (blocks[0], blocks[2], blocks[1]):
            allocator.free(block)
        assert allocator.malloc(15 * MIB - 512).address == blocks[0].address
        assert allocator.reserved_bytes == 20 * MIB

    def test_free_twice(self):
        allocator = make()
        block = allocator.malloc(1)
        allocator.free(block)
        with pytest.raises(ValueError, match="not in use"):
            allocator.free(block)


class TestMaxSplit:
    OPTIONS = "max_split_size_mb:32"

    def test_oversize_blocks_serve_no_smaller_request(self):
        allocator = make(self.OPTIONS)
        allocator.free(allocator.malloc(40 * MIB))
        allocator.malloc(30 * MIB)
        assert allocator.reserved_bytes == 70 * MIB

    def test_oversize_requests_accept_a_little_waste(self):
        allocator = make(self.OPTIONS)
        allocator.free(allocator.malloc(60 * MIB))
        allocator.malloc(40 * MIB)  # 60 < 40 + 20 does not hold
        assert allocator.reserved_bytes == 100 * MIB
        block = allocator.malloc(40 * MIB + 512)
        assert (block.size, allocator.reserved_bytes) == (60 * MIB, 100 * MIB)

    def test_only_enough_oversize_blocks_are_released(self):
        allocator = make(self.OPTIONS, capacity_mib=200)
        for block in [allocator.malloc(size * MIB) for size in (40, 60, 80)]:
            allocator.free(block)
        allocator.malloc(25 * MIB)  # does not fit beside 180 MiB: the smallest oversize block goes
        assert (allocator.reserved_bytes, allocator.cuda_frees, allocator.retries) == ((60 + 80 + 26) * MIB, 1, 0)
        allocator.malloc(110 * MIB)  # none is large enough: the largest ones go, 80 and then 60
        assert (allocator.reserved_bytes, allocator.cuda_frees, allocator.retries) == ((26 + 110) * MIB, 3, 0)


class TestFullDevice:
    def test_cached_segments_are_released_and_the_request_retried(self):
        allocator = make(capacity_mib=100)
        kept = allocator.malloc(5 * MIB)
        allocator.free(allocator.malloc(60 * MIB))
        allocator.malloc(70 * MIB)
        assert (allocator.reserved_bytes, allocator.retries, allocator.cuda_frees) == (90 * MIB, 1, 1)
        allocator.free(kept)

    def test_a_segment_in_use_is_not_released(self):
        allocator = make(capacity_mib=100)
        allocator.malloc(5 * MIB)  # keeps 20 MiB
        allocator.free(allocator.malloc(60 * MIB))
        with pytest.raises(OutOfMemoryError) as caught:
            allocator.malloc(82 * MIB)
        error = caught.value
        assert error.requested_bytes == 82 * MIB
        assert error.allocated_bytes == 5 * MIB
        assert error.reserved_bytes == 20 * MIB
        assert error.capacity_bytes == 100 * MIB
        assert allocator.ooms == 1
        allocator.malloc(80 * MIB)

    def test_fraction(self):
        allocator = make("per_process_memory_fraction:0.5", capacity_mib=100)
        allocator.malloc(50 * MIB)
        with pytest.raises(OutOfMemoryError, match=r"50\.0 MiB reserved of 50\.0 MiB"):
            allocator.malloc(1)

    def test_reject_without_release(self):
        allocator = make("throw_on_cudamalloc_oom:True", capacity_mib=100)
        allocator.free(allocator.malloc(60 * MIB))
        with pytest.raises(OutOfMemoryError):
            allocator.malloc(70 * MIB)
        assert (allocator.reserved_bytes, allocator.retries, allocator.ooms) == (60 * MIB, 0, 0)

    def test_garbage_collection(self):
        allocator = make("garbage_collection_threshold:0.5,per_process_memory_fraction:0.8", capacity_mib=200)
        old, young = allocator.malloc(50 * MIB), allocator.malloc(40 * MIB)
        allocator.free(old)
        allocator.malloc(20 * MIB + 512, stream=1)  # ages what is cached; 114 MiB are above 0.5 * 160 now
        allocator.free(young)
        allocator.malloc(12 * MIB, stream=1)  # 50 MiB have age 2, 40 MiB age 1: the mean lets the older go
        assert (allocator.cuda_frees, allocator.retries) == (1, 0)
        assert allocator.reserved_bytes == (40 + 22 + 12) * MIB

    def test_peaks(self):
        allocator = make()
        allocator.free(allocator.malloc(4 * MIB))
        assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (4 * MIB, 20 * MIB)
        assert allocator.peak_requested_bytes == 4 * MIB
        allocator.empty_cache()
        allocator.reset_peaks()
        assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (0, 0)


class TestExpandableSegments:
    OPTIONS = "expandable_segments:True"

    def test_grows_page_by_page(self):
        allocator = make(self.OPTIONS)
        first = allocator.malloc(15 * MIB)
        assert allocator.reserved_bytes == 20 * MIB
        second = allocator.malloc(15 * MIB)  # takes the 5 MiB left, and one page more
        assert second.address == first.address + 15 * MIB
        assert (allocator.reserved_bytes, allocator.cuda_mallocs) == (40 * MIB, 2)

    def test_splits_to_512_bytes(self):
        allocator = make(self.OPTIONS)
        allocator.malloc(20 * MIB - 512)
        assert allocator.allocated_bytes == 20 * MIB - 512

    def test_a_full_device_unmaps_whole_pages(self):
        allocator = make(self.OPTIONS, capacity_mib=102)
        head, tail = allocator.malloc(70 * MIB), allocator.malloc(5 * MIB)
        assert allocator.reserved_bytes == 80 * MIB
        allocator.free(head)
        # Another stream needs 60 MiB: pages 0 to 2 hold nothing, page 3 holds the tail.
        allocator.malloc(50 * MIB, stream=1)
        assert (allocator.reserved_bytes, allocator.retries, allocator.cuda_frees) == (80 * MIB, 1, 1)
        allocator.free(tail)

    def test_a_hole_is_mapped_again_before_the_end_grows(self):
        allocator = make(self.OPTIONS)
        head, tail = allocator.malloc(60 * MIB), allocator.malloc(20 * MIB)
        allocator.free(head)
        allocator.empty_cache()
        assert allocator.reserved_bytes == 20 * MIB
        again = allocator.malloc(30 * MIB)
        assert (again.address, allocator.reserved_bytes) == (head.address, 60 * MIB)
        assert tail.address == head.address + 60 * MIB

    def test_the_growing_end_is_kept_for_large_requests(self):
        allocator = make(self.OPTIONS)
        blocks = [allocator.malloc(size * MIB) for size in (8, 4, 3)]  # leaves 5 MiB at the end
        allocator.free(blocks[0])
        # 5 MiB would fit better, but can grow without end.
        assert allocator.malloc(5 * MIB).address == blocks[0].address


class TestConfig:
    def test_defaults(self):
        assert AllocatorConfig.parse("") == AllocatorConfig()
        assert AllocatorConfig().non_split_rounding == 20 * MIB

    def test_all_options(self):
        config = AllocatorConfig.parse(
            " max_split_size_mb : 128 ,max_non_split_rounding_mb:64,garbage_collection_threshold:0.6,"
            "per_process_memory_fraction:0.9,expandable_segments:False,large_segment_size_mb:32,backend:native,"
            "pinned_use_background_threads:True,throw_on_cudamalloc_oom:True,"
        )
        assert config == AllocatorConfig(
            max_split_size=128 * MIB,
            max_non_split_rounding=64 * MIB,
            garbage_collection_threshold=0.6,
            per_process_memory_fraction=0.9,
            large_segment_size=32 * MIB,
            throw_on_cudamalloc_oom=True,
        )

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("max_split_size_mb:19", "at least 20 MiB"),
            ("max_split_size_mb:32,large_segment_size_mb:64", "at least 64 MiB"),
            ("max_non_split_rounding_mb:1", "at least 20 MiB"),
            ("large_segment_size_mb:10", "above 10 MiB"),
            ("max_split_size_mb", "has no value"),
            ("max_split_size_mb:", "has no value"),
            (",max_split_size_mb:128", "has no value"),
            ("max_split_size_mb:many", "not a whole number"),
            ("max_split_size_mb:128 expandable_segments:True", "expected ','"),
            ("garbage_collection_threshold:1", "between 0 and 1"),
            ("garbage_collection_threshold:nan", "between 0 and 1"),
            ("garbage_collection_threshold:half", "not a number"),
            ("per_process_memory_fraction:1.5", r"in \[0, 1\]"),
            ("expandable_segments:true", "True or False"),
            ("roundup_power2_divisions:3", "not a power of two"),
            ("roundup_power2_divisions:0", "not a power of two"),
            ("roundup_power2_divisions:[255:2]", "not a power of two"),
            ("roundup_power2_divisions:[256]", "not size:divisions"),
            ("roundup_power2_divisions:[256:1,512:2", "not closed"),
            ("expandable_segments:True:max_split_size_mb:20", "expected ','"),
            ("backend:cudaMallocAsync", "not modelled"),
            ("color:blue", "unknown option 'color'"),
        ],
    )
    def test_refused(self, text, message):
        with pytest.raises(UsageError, match=message):
            AllocatorConfig.parse(text)

    def test_number_of_divisions(self):
        with pytest.raises(UsageError, match="16 values"):
            AllocatorConfig(roundup_power2_divisions=(2,))


class TestReplay:
    def tape(self):
        """In MiB: 12 kept; step 1 makes 30 beside it; step 2 makes 4 and 25, then frees the 4 and makes 5."""
        builder = TapeBuilder()
        builder.keep("w", (12 * MIB,), dtype="uint8")
        builder.step().op("a", makes={"a": (30 * MIB,)}, dtype="uint8").free("a")
        builder.step().op("b", makes={"b": (4 * MIB,), "c": (25 * MIB,), "none": (0,)}, dtype="uint8")
        return builder.free("b").op("d", makes={"d": (5 * MIB,)}, dtype="uint8").free("d", "c").build()

    def test_plan(self):
        # b is cut from the 30 MiB that a left (26 MiB remain), c takes 25 of them; its rest of 1 MiB stays with it.
        # d then needs a segment of 20 MiB, as b's 4 MiB are too few.
        plan = replay(self.tape(), AllocatorConfig())
        assert plan.peak_allocated_bytes == 43 * MIB
        assert plan.peak_event == 7
        assert plan.reserved_at_peak_bytes == 62 * MIB
        assert plan.peak_reserved_bytes == 62 * MIB
        assert plan.steps == (StepPeak(42 * MIB, 42 * MIB), StepPeak(43 * MIB, 62 * MIB))
        assert plan.block_bytes == tuple(size * MIB for size in (12, 30, 4, 26, 0, 5))
        assert (plan.cuda_mallocs, plan.retries, plan.oom) == (3, 0, None)

    def test_the_setup_can_be_the_peak(self):
        builder = TapeBuilder().keep("w", (30 * MIB,), dtype="uint8").keep("v", (2 * MIB,), dtype="uint8").free("w")
        plan = replay(builder.step().build(), AllocatorConfig())
        assert (plan.peak_allocated_bytes, plan.peak_event) == (32 * MIB, 1)
        assert plan.steps == (StepPeak(2 * MIB, 50 * MIB),)

    def test_too_small(self):
        plan = replay(self.tape(), AllocatorConfig(), 50 * MIB)
        assert plan.oom is not None
        assert plan.oom.event == 7
        assert plan.oom.requested_bytes == 5 * MIB
        assert plan.oom.allocated_bytes == 38 * MIB
        assert plan.oom.reserved_bytes == 42 * MIB
        assert plan.oom.capacity_bytes == 50 * MIB
        assert plan.retries == 1
        assert plan.block_bytes[-1] == 0
        assert replay(self.tape(), AllocatorConfig(), 62 * MIB).oom is None

    def test_nothing(self):
        plan = replay(TapeBuilder().build(), AllocatorConfig())
        assert (plan.peak_allocated_bytes, plan.peak_reserved_bytes, plan.peak_event) == (0, 0, None)
        assert plan.steps == ()
