"""Drive PyTorch's own caching allocator and fxmem's side by side, and compare them after every event.

The real one is the CUDA build of torch on the phantom device (``calibration/phantom``), so no GPU is
needed. Traces are random: several streams, sizes around every threshold, bursts, frees in several
orders, empty_cache, and capacities small enough for retries and OOMs::

    PHANTOM_PYTHON=.venv/bin/python python calibration/allocator_differential.py --traces 10000

Each option set runs in a process of its own, so that PyTorch reads it from ``PYTORCH_ALLOC_CONF``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from fxmem.allocator import AllocatorConfig, Block, CachingAllocator
from fxmem.errors import OutOfMemoryError

MIB = 2**20
PHANTOM = Path(__file__).parent / "phantom" / "phantom_run"
OPTIONS = (
    "",
    "max_split_size_mb:20",
    "max_split_size_mb:32",
    "max_split_size_mb:64,max_non_split_rounding_mb:40",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.8",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.95,max_split_size_mb:32",
    "garbage_collection_threshold:0.5",
    "per_process_memory_fraction:0.6",
    "per_process_memory_fraction:0.6,throw_on_cudamalloc_oom:True",
    "throw_on_cudamalloc_oom:True",
    "throw_on_cudamalloc_oom:True,expandable_segments:True",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:2,8:4,64:8,>:2],max_split_size_mb:48",
    "large_segment_size_mb:11",
    "large_segment_size_mb:21,max_split_size_mb:40",
    "large_segment_size_mb:64",
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:32",
    "expandable_segments:True,large_segment_size_mb:32,roundup_power2_divisions:8",
    "expandable_segments:True,per_process_memory_fraction:0.7,garbage_collection_threshold:0.5",
    "expandable_segments:True,per_process_memory_fraction:0.7,throw_on_cudamalloc_oom:True",
)
CAPACITIES_MIB = (96, 512, 2048, 139 * 1024)
EDGES = (512, 1 * MIB, 2 * MIB, 10 * MIB, 20 * MIB, 32 * MIB, 64 * MIB)


class Figures(tuple[int, ...]):
    """What is compared, in the order of ``NAMES``."""

    __slots__ = ()
    NAMES = (
        "allocated", "reserved", "requested", "peak_allocated", "peak_reserved",
        "cuda_mallocs", "cuda_frees", "retries", "ooms",
    )  # fmt: skip

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in zip(self.NAMES, self, strict=True))


class Real:
    """PyTorch's allocator behind the calls that the traces need."""

    def __init__(self, streams: int) -> None:
        import torch

        torch.cuda.init()
        self._torch: Any = torch
        self._keep = [torch.cuda.Stream() for _ in range(streams - 1)]
        self._streams = [0, *(stream.cuda_stream for stream in self._keep)]

    def reset_peaks(self) -> None:
        self._torch._C._cuda_resetPeakMemoryStats(0)

    def malloc(self, nbytes: int, stream: int) -> int | None:
        try:
            return int(self._torch._C._cuda_cudaCachingAllocator_raw_alloc(nbytes, self._streams[stream]))
        except self._torch.OutOfMemoryError:
            return None

    def free(self, handle: int) -> None:
        self._torch._C._cuda_cudaCachingAllocator_raw_delete(handle)

    def empty_cache(self) -> None:
        self._torch._C._cuda_emptyCache()

    def figures(self) -> Figures:
        stats = self._torch._C._cuda_memoryStats(0)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return Figures(
            (
                allocated["current"], reserved["current"], stats["requested_bytes"]["all"]["current"],
                allocated["peak"], reserved["peak"],
                stats["num_device_alloc"], stats["num_device_free"], stats["num_alloc_retries"], stats["num_ooms"],
            )
        )  # fmt: skip


def modelled(model: CachingAllocator) -> Figures:
    """The same figures from fxmem's allocator."""
    return Figures(
        (
            model.allocated_bytes, model.reserved_bytes, model.requested_bytes,
            model.peak_allocated_bytes, model.peak_reserved_bytes,
            model.cuda_mallocs, model.cuda_frees, model.retries, model.ooms,
        )
    )  # fmt: skip


class Pair:
    """Both allocators, given the same calls; a call returns how the outcomes differ."""

    def __init__(self, real: Real, model: CachingAllocator) -> None:
        self.real = real
        self.model = model
        self.live: list[tuple[int, Block]] = []
        self._offset: int | None = None

    def malloc(self, size: int, stream: int) -> str | None:
        handle = self.real.malloc(size, stream)
        try:
            block = self.model.malloc(size, stream)
        except OutOfMemoryError:
            block = None
        if handle is None and block is None:
            return None
        if handle is None or block is None:
            return f"only {'fxmem' if handle is None else 'torch'} found room"
        self.live.append((handle, block))
        # The phantom takes the lowest free addresses, as the model does: places must agree, up to a constant.
        if self._offset is None:
            self._offset = handle - block.address
        return None if handle - block.address == self._offset else f"{block} is at another place for torch"

    def free(self, at: int) -> str | None:
        handle, block = self.live.pop(at)
        self.real.free(handle)
        self.model.free(block)
        return None

    def empty_cache(self) -> str | None:
        self.real.empty_cache()
        self.model.empty_cache()
        return None

    def reset(self) -> None:
        while self.live:
            self.free(-1)
        self.empty_cache()
        self.real.reset_peaks()
        self.model.reset_peaks()

    def difference(self) -> str | None:
        theirs, ours = self.real.figures(), modelled(self.model)
        return None if theirs == ours else f"\n  torch {theirs}\n  fxmem {ours}"


def sizes(rng: random.Random, capacity: int) -> Iterator[int]:
    """Request sizes of one trace: a few that recur (ties), edges of the rules, and all else."""
    usual = (1, 1000, 5000, 300_000, MIB, 3 * MIB, 11 * MIB, 25 * MIB)
    common = [rng.choice(usual) * rng.randint(1, 3) for _ in "abcd"]
    top = rng.choice((16, 22, 25, 28, max(20, capacity.bit_length() - 2)))
    while True:
        kind = rng.random()
        if kind < 0.4:
            yield rng.choice(common)
        elif kind < 0.6:
            yield max(1, rng.choice(EDGES) + rng.choice((-513, -512, -1, 0, 1, 512, MIB)))
        elif kind < 0.62:
            yield rng.randint(capacity // 4, capacity)
        else:
            yield rng.randint(1, 1 << rng.randint(1, top))


def run_trace(pair: Pair, capacity: int, streams: int, seed: int) -> str | None:
    """Run one trace on allocators that hold nothing; return the first difference."""
    rng = random.Random(seed)
    pair.reset()
    nbytes, keep = sizes(rng, capacity), rng.choice((3, 10, 30, 100))
    used_streams = rng.choice((1, 1, streams))
    history: list[str] = []
    for _ in range(rng.choice((30, 100, 300))):
        kind = rng.random()
        if kind < 0.01:
            history.append("empty_cache")
            difference = pair.empty_cache()
        elif pair.live and kind < (0.65 if len(pair.live) > keep else 0.35):
            at = rng.choice((0, -1, rng.randrange(len(pair.live))))
            history.append(f"free {pair.live[at][1]}")
            difference = pair.free(at)
        else:
            size, stream = next(nbytes), rng.randrange(used_streams)
            history.append(f"malloc {size} on {stream}")
            difference = pair.malloc(size, stream)
        difference = difference or pair.difference()
        if difference:
            return f"after {len(history)} events, {history[-5:]}: {difference}"
    pair.reset()
    return pair.difference()


def work(options: str, traces: int, seed: int) -> None:
    """Run in a process under the phantom: one option set and capacity; print one JSON line.

    Both allocators live as long as the process. A difference ends it, as they are then no longer in the same state.
    """
    streams = 3
    real = Real(streams)
    capacity = int(real._torch.cuda.get_device_properties(0).total_memory)
    pair = Pair(real, CachingAllocator(AllocatorConfig.parse(options), capacity))
    equal, difference = 0, None
    while equal < traces and difference is None:
        difference = run_trace(pair, capacity, streams, seed + equal)
        equal += difference is None
    counts = {"equal": equal, "retries": pair.model.retries, "ooms": pair.model.ooms}
    print(json.dumps(counts | {"difference": difference and f"seed {seed + equal}: {difference}"}))


def compare(options: str, capacity_mib: int, traces: int, seed: int) -> dict[str, Any]:
    """Run traces for one option set and capacity in a process of its own."""
    environment = os.environ | {
        "PYTORCH_ALLOC_CONF": options,
        "PHANTOM_MEM_GIB": str(capacity_mib / 1024),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    command: list[str | Path] = [PHANTOM, __file__, "--work", options, "--traces", str(traces), "--seed", str(seed)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{options or 'defaults'}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    """Share the traces out over all option sets and capacities; 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=380)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="run option sets that contain this text")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments.work, arguments.traces, arguments.seed)
        return 0
    chosen = [options for options in OPTIONS if not arguments.only or arguments.only in options]
    pairs = [(options, capacity) for options in chosen for capacity in CAPACITIES_MIB]
    equal = total = 0
    for number, (options, capacity) in enumerate(pairs):
        share = arguments.traces * (number + 1) // len(pairs) - arguments.traces * number // len(pairs)
        result = compare(options, capacity, share, arguments.seed + 1_000_000 * number)
        equal, total = equal + result["equal"], total + share
        print(
            f"{result['equal']:6} of {share:6} equal  {result['retries']:6} retries {result['ooms']:6} ooms"
            f"  {capacity:7} MiB  {options or 'defaults'}",
            flush=True,
        )
        if result["difference"]:
            print(f"    {result['difference']}")
    print(f"{equal} of {total} traces equal")
    return int(equal != total)


if __name__ == "__main__":
    sys.exit(main())
