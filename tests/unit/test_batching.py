"""The budget against the replay, the options of the plan, and their speed."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import pytest
from budgets import DEVICE, SEQS, TARGET, attention, budget, estimate, fits

from fxmem.allocator import AllocatorConfig, CachingAllocator
from fxmem.batching import Batch, MemoryBudget, Policy, Request, plan
from fxmem.device import find_device
from fxmem.errors import UsageError
from fxmem.kernels import expand

ROOM = int(2**30 * 0.9)


@pytest.mark.parametrize("seq", SEQS)
def test_it_agrees_with_the_proved_batch(seq):
    known = estimate(seq).max_batch
    assert budget().largest(seq) == known.batch > 0
    assert budget().fits(known.batch, seq)
    assert not budget().fits(known.batch + 1, seq)
    assert fits(known.batch, seq, ROOM)
    assert not fits(known.batch + 1, seq, ROOM)


@pytest.mark.parametrize("seq", [1, 17, 40, 100, 127, 130, 200, 255])
def test_between_the_lengths_it_is_safe_and_not_far_off(seq):
    largest = budget().largest(seq)
    assert budget().fits(largest, seq)
    assert not budget().fits(largest + 1, seq)
    assert fits(largest, seq, ROOM)
    if seq > SEQS[0]:
        assert not fits(int(largest * 1.7), seq, ROOM)


def test_another_device_and_safety():
    large = MemoryBudget(estimate(128), find_device("2GiB", context=0))
    small = MemoryBudget(estimate(128), DEVICE, 0.5)
    assert small.largest() < budget().largest(128) < large.largest()
    assert fits(large.largest(), 128, int(2**31 * 0.9))
    assert fits(small.largest(), 128, 2**29)
    assert MemoryBudget(estimate(128), DEVICE, processes=2).largest() < small.largest()
    assert large.bytes(8) > large.bytes(4)


def test_what_it_does_not_know_does_not_fit():
    assert not budget().fits(1, 257)
    assert not budget().fits(1)
    assert budget().largest(257) == 0
    with pytest.raises(UsageError, match="reach sequences of 256"):
        budget().bytes(1, 300)
    bare = replace(estimate(128), max_batch=None, scaling=replace(estimate(128).scaling, pieces=()))
    with pytest.raises(UsageError, match="do not reach batch 1"):
        MemoryBudget(bare, DEVICE).bytes(1)
    assert not MemoryBudget(bare, DEVICE).fits(1)


def test_wrong_budgets():
    with pytest.raises(UsageError, match="limit"):
        MemoryBudget(estimate(128), find_device())
    with pytest.raises(UsageError, match="estimate"):
        MemoryBudget({}, DEVICE)
    with pytest.raises(UsageError, match="samples"):
        Request(id=1, samples=0)


def test_an_answer_takes_microseconds():
    ask = budget().fits
    began = time.perf_counter()
    for _ in range(10_000):
        ask(20, 100)
    assert (time.perf_counter() - began) / 10_000 < 20e-6 * 5  # five times: other work shares the machine


def requests(*seqs, samples=1):
    return [Request(id=i, seq=seq, samples=samples, arrived=float(i)) for i, seq in enumerate(seqs)]


def ids(batches):
    return [[request.id for request in batch.requests] for batch in batches]


def test_packed_by_length():
    found = plan(requests(16, 256, 16, 256), budget(), Policy(max_samples=2))
    assert sorted(map(sorted, ids(found.batches))) == [[0, 2], [1, 3]]
    assert {batch.seq for batch in found.batches} == {16, 256}


def test_in_order():
    found = plan(requests(16, 256, 16, 256), budget(), Policy(max_samples=2, keep_order=True))
    assert ids(found.batches) == [[0, 1], [2, 3]]
    assert [batch.seq for batch in found.batches] == [256, 256]


def test_overdue_requests_go_first():
    found = plan(requests(16, 256, 64, 16), budget(), Policy(max_samples=2, max_wait=2.0), now=3.0)
    assert ids(found.batches)[0] == [0, 1]
    assert sorted(ids(found.batches)[1]) == [2, 3]


def test_little_padding():
    policy = Policy(max_padding=0.5)
    assert len(plan(requests(256, 128, 127), budget(), policy).batches) == 2
    assert len(plan(requests(256, 128, 127), budget(), replace(policy, keep_order=True)).batches) == 2
    assert len(plan(requests(256, 128, 127), budget()).batches) == 1


def test_what_can_never_fit_is_returned():
    found = plan([*requests(16, 300), Request(id="huge", samples=10**6, seq=16)], budget())
    assert [request.id for request in found.impossible] == [1, "huge"]
    assert ids(found.batches) == [[0]]
    assert plan([], budget()).batches == ()


def test_one_length():
    single = MemoryBudget(estimate(128), DEVICE)
    found = plan([Request(id=i, samples=3) for i in range(100)], single)
    assert sum(batch.samples for batch in found.batches) == 300
    assert max(batch.samples for batch in found.batches) <= single.largest()


@pytest.mark.parametrize("policy", [Policy(), Policy(keep_order=True), Policy(max_wait=1.0, max_padding=0.3)])
def test_a_hundred_thousand_requests(policy):
    draw = random.Random(1)
    many = [Request(id=i, samples=draw.randint(1, 4), seq=draw.randint(1, 256), arrived=float(i)) for i in range(10**5)]
    began = time.perf_counter()
    found = plan(many, budget(), policy, now=2000.0)
    assert time.perf_counter() - began < 2 * 5  # five times: other work shares the machine
    assert sum(len(batch.requests) for batch in found.batches) == 10**5


class Gpu:
    """One process's allocator; it runs batch after batch."""

    def __init__(self) -> None:
        self.allocator = CachingAllocator(AllocatorConfig(), ROOM)
        self._weights = self.allocator.malloc(4 << 20)
        self.batches = 0

    def run(self, batch: Batch) -> None:
        tape, blocks = expand(attention(batch.samples, batch.seq), TARGET), {}
        for event in tape.events:
            if event >= 0:
                storage = tape.storages[event]
                known = storage.name == "w"
                blocks[event] = None if known else self.allocator.malloc(storage.nbytes, storage.stream)
            else:
                self.allocator.free(blocks.pop(~event))
        for block in blocks.values():
            self.allocator.free(block)
        self.batches += 1


def test_traffic_against_one_allocator():
    """Batches of mixed shapes, one after the other: the cache of former shapes must not stand in the way."""
    draw, gpu = random.Random(2), Gpu()
    waiting = [Request(id=i, samples=draw.randint(1, 6), seq=draw.randint(1, 256)) for i in range(3000)]
    for batch in plan(waiting, budget(), Policy(keep_order=True)).batches:
        gpu.run(batch)
    assert gpu.batches > 50
    assert gpu.allocator.ooms == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Policy(max_wait=2.0), Policy(keep_order=True), Policy(max_padding=0.4)])
def test_an_hour_of_traffic(policy):
    """Requests come in waves and bursts; the server runs what waits whenever it is free. Nothing runs out of memory."""
    draw, gpu = random.Random(3), Gpu()
    now, number, done = 0.0, 0, []
    waiting: list[Request] = []
    coming = 0.0
    while now < 3600.0:
        while coming <= now:
            rate = 15.0 * (1.0 + math.sin(coming / 600.0)) + 1.0
            for _ in range(40 if draw.random() < 0.005 else 1):
                length = min(int(draw.expovariate(1 / 60)) + 1, 256)
                waiting.append(Request(id=number, samples=draw.randint(1, 6), seq=length, arrived=coming))
                number += 1
            coming += draw.expovariate(rate)
        found = plan(waiting, budget(), policy, now=now)
        waiting = []
        assert not found.impossible
        for batch in found.batches:
            gpu.run(batch)
            done += [request.id for request in batch.requests]
            now += 0.05 + batch.samples * batch.seq * 3e-5
        now = now if found.batches else coming
    assert gpu.batches > 1000
    assert len(done) == len(set(done)) == number > 50_000
    assert policy.keep_order is (done == sorted(done))
    assert gpu.allocator.ooms == 0


def test_a_budget_takes_a_devices_name():
    named = MemoryBudget(estimate(16), "1GiB")
    assert named.allocator_bytes == MemoryBudget(estimate(16), find_device("1GiB")).allocator_bytes
    with pytest.raises(UsageError, match="a budget needs a limit"):
        MemoryBudget(estimate(16), find_device())
