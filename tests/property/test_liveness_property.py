"""Peaks and lifetimes of random programs against the plainest possible count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tape_strategies import Program, programs

from fxmem import liveness
from fxmem.tape import Role, Tape

batches = st.integers(1, 5)


def brute_force(tape: Tape, roles: frozenset[Role]) -> list[int]:
    """Bytes live after each event, by keeping the set of live storages."""
    live: set[int] = set()
    result = []
    for event in tape.events:
        live = live | {event} if event >= 0 else live - {~event}
        result.append(sum(tape.storages[s].nbytes for s in live if tape.storages[s].role in roles))
    return result


def requested(tape: Tape) -> list[int]:
    return [storage.nbytes for storage in tape.storages]


@given(programs, batches)
def test_the_peak_equals_a_brute_force_count(program: Program, batch: int) -> None:
    tape = program.tape(batch)
    for roles in (frozenset(Role), liveness.ACTIVATION_ROLES):
        counts = brute_force(tape, roles)
        peak = liveness.peak(tape, requested(tape), roles)
        assert peak.nbytes == max(counts, default=0)
        if peak.nbytes:
            assert counts.index(peak.nbytes) == peak.event


@given(programs, batches)
def test_observed_intervals_say_what_is_live(program: Program, batch: int) -> None:
    tape = program.tape(batch)
    seen = liveness.observed(tape)
    for event in range(-1, len(tape.events)):
        expected = tuple(
            index for index, (born, dies) in enumerate(seen) if born <= event and (dies is None or event < dies)
        )
        assert liveness.live_at(tape, event) == expected


@given(programs, batches)
def test_freeing_after_the_last_use_never_needs_more(program: Program, batch: int) -> None:
    tape = program.tape(batch)
    lives = liveness.lifetimes(tape)
    assert liveness.last_use_peak(tape, requested(tape), lives).nbytes <= liveness.peak(tape, requested(tape)).nbytes


@given(programs, batches)
def test_no_operator_uses_a_storage_outside_its_last_use_interval(program: Program, batch: int) -> None:
    tape = program.tape(batch)
    lives = liveness.lifetimes(tape)
    for index, op in enumerate(tape.ops):
        for meta in (*op.inputs, *op.outputs):
            born, dies = lives.last_use[meta.storage]
            assert born <= index
            assert dies is None or index < dies


@given(programs, batches)
def test_the_top_row_of_the_module_table_counts_everything(program: Program, batch: int) -> None:
    tape = program.tape(batch)
    top = liveness.module_table(tape)[0]
    assert top.path == ""
    assert top.peak_bytes == liveness.peak(tape, requested(tape)).nbytes
    assert top.flops == sum(op.flops for op in tape.ops if op.step == 1)
