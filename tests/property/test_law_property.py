"""The batch law of random programs against the tapes of the same programs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tape_strategies import Program, programs

from fxmem import liveness
from fxmem.law import fit

trios = st.sets(st.integers(1, 12), min_size=3, max_size=4)


@given(programs, trios, st.integers(0, 40))
@settings(max_examples=60)
def test_the_tape_at_a_batch_is_the_one_traced_there(program: Program, traced: set[int], further: int) -> None:
    law = fit([program.tape(batch) for batch in traced])
    batch = min(traced) + further
    assert law.exact, law.why
    assert law.covers(batch)
    expected = program.tape(batch)
    assert law.at(batch) == expected
    assert law.sizes(batch) == [storage.nbytes for storage in expected.storages]


@given(programs, trios)
@settings(max_examples=60)
def test_the_pieces_are_the_brute_force_peak_at_every_batch(program: Program, traced: set[int]) -> None:
    law = fit([program.tape(batch) for batch in traced])
    pieces = law.pieces()
    assert pieces[0].from_batch == min(traced)
    assert pieces[-1].to_batch is None
    assert [piece.from_batch for piece in pieces[1:]] == [(piece.to_batch or 0) + 1 for piece in pieces[:-1]]
    for batch in range(min(traced), 60):
        tape = program.tape(batch)
        peak = liveness.peak(tape, [storage.nbytes for storage in tape.storages]).nbytes
        assert law.requested_peak(batch) == peak
        assert [piece.at(batch) for piece in pieces if piece.covers(batch)] == [peak]


@given(programs, trios)
@settings(max_examples=60)
def test_slopes_rise_from_piece_to_piece(program: Program, traced: set[int]) -> None:
    slopes = [piece.per_sample_bytes for piece in fit([program.tape(batch) for batch in traced]).pieces()]
    assert slopes == sorted(set(slopes))


@given(programs, trios)
@settings(max_examples=60)
def test_the_activation_slope_is_a_difference_quotient_from_below(program: Program, traced: set[int]) -> None:
    law = fit([program.tape(batch) for batch in traced])
    batch = max(traced)
    slope = law.activation_slope(batch)
    here, there = (
        liveness.peak(tape, [storage.nbytes for storage in tape.storages], liveness.ACTIVATION_ROLES).nbytes
        for tape in (program.tape(batch), program.tape(batch + 1))
    )
    assert slope is not None
    assert 0 <= slope <= there - here
