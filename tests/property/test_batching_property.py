"""Whatever waits: every planned batch fits, no request is lost or doubled, order is kept where asked."""

from __future__ import annotations

from collections import Counter

from budgets import SEQS, budget, fits
from hypothesis import given, settings
from hypothesis import strategies as st

from fxmem.batching import Policy, Request, plan

ROOM = int(2**30 * 0.9)
REQUESTS = st.lists(
    st.tuples(st.integers(1, 90), st.integers(1, SEQS[-1] + 20), st.floats(0, 100)), max_size=60
).map(
    lambda rows: [Request(id=i, samples=n, seq=s, arrived=t) for i, (n, s, t) in enumerate(rows)]
)  # fmt: skip
POLICIES = st.builds(
    Policy,
    keep_order=st.booleans(),
    max_samples=st.none() | st.integers(1, 50),
    max_wait=st.none() | st.floats(0, 100),
    max_padding=st.floats(0, 1),
)


@given(REQUESTS, POLICIES)
def test_nothing_is_lost_and_all_fits(requests, policy):
    found = plan(requests, budget(), policy, now=100.0)
    planned = [request for batch in found.batches for request in batch.requests]
    assert Counter(map(id, [*planned, *found.impossible])) == Counter(map(id, requests))
    for batch in found.batches:
        assert batch.samples == sum(request.samples for request in batch.requests)
        assert batch.seq == max(request.seq for request in batch.requests)
        assert budget().fits(batch.samples, batch.seq)
        assert policy.max_samples is None or batch.samples <= policy.max_samples
    for request in found.impossible:
        assert not budget().fits(request.samples, request.seq) or request.samples > (policy.max_samples or 0)


@given(REQUESTS)
def test_order_is_kept(requests):
    found = plan(requests, budget(), Policy(keep_order=True))
    planned = [request.id for batch in found.batches for request in batch.requests]
    assert planned == sorted(planned)


@given(REQUESTS, st.floats(0, 100))
def test_the_overdue_go_first(requests, wait):
    found = plan(requests, budget(), Policy(max_wait=wait), now=100.0)
    planned = [request for batch in found.batches for request in batch.requests]
    overdue = [request.arrived <= 100.0 - wait for request in planned]
    assert overdue == sorted(overdue, reverse=True)


@given(st.integers(1, 400), st.integers(1, SEQS[-1]))
def test_less_never_needs_more(batch, seq):
    ask = budget().fits
    if ask(batch, seq):
        assert ask(max(batch - 1, 1), seq)
        assert ask(batch, max(seq - 1, 1))


@settings(max_examples=25)
@given(REQUESTS)
def test_planned_batches_replay(requests):
    for batch in plan(requests, budget()).batches:
        assert fits(batch.samples, batch.seq, ROOM)
