from __future__ import annotations

import time
from dataclasses import replace

import pytest
from tapes import TapeBuilder, mlp

from fxmem.law import BatchLaw, Piece, fit
from fxmem.liveness import ACTIVATION_ROLES, peak
from fxmem.tape import Op, Phase, Ref, Role, Tape


def two_humps(batch: int) -> Tape:
    """A fixed hump of 1000 bytes, then one of 40 + 96 * batch bytes."""
    b = TapeBuilder(batch).step()
    b.op("fixed.default", makes={"a": (250,)}, module="early").free("a")
    b.op("grows.default", makes={"b": (10,), "c": (batch, 24)}, role=Role.ACTIVATION, module="late").free("b", "c")
    return b.build()


def changed(tape: Tape, index: int, **fields: object) -> Tape:
    op: Op = replace(tape.ops[index], **fields)  # type: ignore[arg-type]
    return replace(tape, ops=(*tape.ops[:index], op, *tape.ops[index + 1 :]))


def traces(*batches: int) -> list[Tape]:
    return [mlp(batch) for batch in batches]


def test_the_law_writes_the_tape_of_any_batch() -> None:
    law = fit(traces(2, 5, 3))
    assert law.exact
    assert law.why == ""
    for batch in (2, 3, 4, 5, 64, 100_000):
        assert law.at(batch) == mlp(batch)
        assert law.sizes(batch) == [storage.nbytes for storage in mlp(batch).storages]


def test_the_law_says_nothing_below_its_smallest_batch() -> None:
    law = fit(traces(2, 3, 4))
    assert not law.covers(1)
    for ask in (law.at, law.sizes, law.requested_peak):
        with pytest.raises(ValueError, match="does not cover batch 1"):
            ask(1)
    assert law.activation_slope(1) is None


def test_pieces_are_the_upper_envelope_with_whole_break_points() -> None:
    law = fit([two_humps(batch) for batch in (1, 2, 4)])
    # 40 + 96 * 10 = 1000: from batch 10 on the second hump is not below the first.
    assert law.pieces() == (
        Piece(from_batch=1, to_batch=9, fixed_bytes=1000, per_sample_bytes=0),
        Piece(from_batch=10, to_batch=None, fixed_bytes=40, per_sample_bytes=96),
    )
    assert law.requested_peak(9) == 1000
    assert law.requested_peak(11) == 1096


def test_a_line_that_leads_at_no_whole_batch_is_no_piece() -> None:
    def tape(batch: int) -> Tape:
        b = TapeBuilder(batch).step()
        for name, fixed, slope in (("a", 100, 0), ("b", 30, 20), ("c", 0, 29)):
            b.op("make.default", makes={name: (fixed + slope * batch,)}, dtype="uint8").free(name)
        return b.build()

    # 30 + 20 b leads between 3.33 and 3.5 only if b is not whole: 100 leads to 3, 29 b from 4 on.
    pieces = fit([tape(1), tape(2), tape(3)]).pieces()
    assert [(piece.from_batch, piece.per_sample_bytes) for piece in pieces] == [(1, 0), (4, 29)]


def test_activation_slope_is_that_of_the_peak_at_the_batch() -> None:
    law = fit([two_humps(batch) for batch in (2, 3, 4)])
    assert law.activation_slope(3) == 0
    assert law.activation_slope(64) == 96
    sizes = law.sizes(64)
    assert peak(law.at(64), sizes, ACTIVATION_ROLES).nbytes == 40 + 96 * 64


def test_batch_one_may_stand_alone() -> None:
    one = changed(mlp(1), 4, args=(Ref(0), "broadcast"))
    law = fit([one, *traces(2, 3, 5)])
    assert law.exact
    assert law.at(1) is one
    assert law.sizes(1) == [storage.nbytes for storage in one.storages]
    assert law.covers(2)
    assert law.pieces()[0] == Piece(
        from_batch=1, to_batch=1, fixed_bytes=peak(one, law.sizes(1)).nbytes, per_sample_bytes=0
    )
    assert law.pieces()[1].from_batch == 2
    assert "op 4" in law.why
    assert "arguments" in law.why
    assert law.activation_slope(1) is None


def test_two_matching_tapes_prove_nothing() -> None:
    law = fit(traces(2, 3))
    assert not law.exact
    assert law.needs_proof
    assert "three batches" in law.why
    assert not law.covers(4)


def test_one_tape_is_a_point() -> None:
    law = fit(traces(7))
    assert not law.exact
    assert law.covers(7)
    assert not law.covers(8)
    assert law.pieces() == (Piece(from_batch=7, to_batch=7, fixed_bytes=law.requested_peak(7), per_sample_bytes=0),)


def test_batch_dependent_code_is_named_and_not_interpolated() -> None:
    other = changed(mlp(8), 4, name="addmm.default")
    law = fit([*traces(2, 4), other])
    assert not law.exact
    assert not law.needs_proof
    assert law.why == "op 4 mm.default in fc2 (model.py:4): operator mm.default at batch 4, addmm.default at batch 8"
    assert [(piece.from_batch, piece.to_batch, piece.per_sample_bytes) for piece in law.pieces()] == [
        (2, 2, 0), (4, 4, 0), (8, 8, 0),
    ]  # fmt: skip
    assert law.at(8) is other
    assert law.activation_slope(4) is None


def test_a_size_that_is_not_affine_is_named() -> None:
    def tape(batch: int) -> Tape:
        b = TapeBuilder(batch).keep("x", (batch, 4), Role.INPUT).step()
        return b.op("mm.default", reads=["x"], makes={"s": (batch, batch)}, module="contrast").build()

    law = fit([tape(2), tape(3), tape(4)])
    assert not law.exact
    assert law.why == (
        "storage 1 of op 1 mm.default in contrast (model.py:1): its size in bytes is"
        " 16 at batch 2, 36 at batch 3, 64 at batch 4: no whole number per sample"
    )


def test_a_size_that_grows_by_half_a_byte_is_not_interpolated() -> None:
    def tape(batch: int) -> Tape:
        return TapeBuilder(batch).step().op("make.default", makes={"s": (batch // 2,)}, dtype="uint8").build()

    law = fit([tape(2), tape(4), tape(6)])
    assert not law.exact
    assert law.why.startswith(
        "storage 0 of op 0 make.default in the top module (model.py:0): its size in bytes is 2 at batch 4"
    )


def test_a_storage_that_shrinks_is_not_extrapolated() -> None:
    def tape(batch: int) -> Tape:
        return TapeBuilder(batch).step().op("make.default", makes={"s": (9 - batch,)}, dtype="uint8").build()

    law = fit([tape(2), tape(3), tape(4)])
    assert not law.exact
    assert "shrinks" in law.why


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"phase": Phase.OPTIMIZER}, "phase"),
        ({"module": "elsewhere"}, "module"),
        ({"kwargs": (("dim", None),)}, "keywords"),
        ({"inputs": ()}, "inputs"),
        ({"thread": "autograd"}, "thread"),
    ],
)
def test_tapes_that_differ_in_a_name_or_reference_do_not_match(fields: dict[str, object], expected: str) -> None:
    law = fit([mlp(2), mlp(3), changed(mlp(4), 5, **fields)])
    assert not law.exact
    assert law.why.startswith("op 5 ")
    assert expected in law.why


def test_other_roles_events_and_lengths_do_not_match() -> None:
    base, more = mlp(4), mlp(4, steps=3)
    last = base.storages[-1]
    role = replace(base, storages=(*base.storages[:-1], replace(last, role=Role.WORKSPACE)))
    swapped = replace(base, events=(*base.events[:-2], base.events[-1], base.events[-2]))
    for other, words in ((more, "only batch 4 runs it"), (role, "role"), (swapped, "event")):
        law = fit([mlp(2), mlp(3), other])
        assert not law.exact
        assert words in law.why


def test_floats_do_not_count() -> None:
    def tape(batch: int) -> Tape:
        return changed(mlp(batch), 3, args=(Ref(0), 1.0 / batch))

    assert fit([tape(2), tape(3), tape(4)]).exact


def test_flops_that_are_not_affine_do_not_cost_the_law() -> None:
    def tape(batch: int) -> Tape:
        return changed(mlp(batch), 3, flops=2 * batch * batch)

    law = fit([tape(2), tape(3), tape(13)])
    assert law.exact
    wanted = changed(mlp(64), 3, flops=0)  # 0: not known
    assert law.at(64) == wanted
    assert law.sizes(64) == [storage.nbytes for storage in wanted.storages]


def test_the_reason_names_memory_before_anything_else() -> None:
    def tape(batch: int) -> Tape:
        b = TapeBuilder(batch).keep("x", (batch, 4), Role.INPUT).step()
        b.op("view.default", reads=["x"], args=(Ref(0), batch * batch), flops=batch * batch)
        return b.op("mm.default", reads=["x"], makes={"s": (batch, batch)}, flops=8 * batch * batch).build()

    assert "its size in bytes is 16 at batch 2" in fit([tape(2), tape(3), tape(4)]).why


def test_true_is_no_one() -> None:
    law = fit([changed(mlp(2), 3, args=(1,)), changed(mlp(3), 3, args=(1,)), changed(mlp(4), 3, args=(True,))])
    assert not law.exact


def test_the_same_batch_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="different batches"):
        fit(traces(2, 2))
    with pytest.raises(ValueError, match="different batches"):
        fit([])


def test_notes_of_all_tapes_are_kept() -> None:
    tapes = [replace(tape, notes=(*tape.notes, note)) for tape, note in zip(traces(2, 3, 4), "aba", strict=True)]
    assert fit(tapes).at(9).notes == ("the loss is the output's mean", "a", "b")


def test_a_law_is_a_value() -> None:
    law = fit(traces(2, 3, 4))
    assert law == fit(traces(2, 3, 4))
    assert isinstance(law, BatchLaw)
    assert len(repr(law)) < 300


def test_fitting_is_quick() -> None:
    def tape(batch: int) -> Tape:
        b = TapeBuilder(batch).step().op("relu.default", makes={"t0": (batch, 3, 8, 8)})
        for index in range(1, 2_500):
            b.op("relu.default", reads=[f"t{index - 1}"], makes={f"t{index}": (batch, 3, 8, 8)}).free(f"t{index - 1}")
        return b.build()

    tapes = [tape(2), tape(3), tape(5)]  # 58,000 integers each
    start = time.process_time()
    assert fit(tapes).exact
    assert time.process_time() - start < 0.6  # 0.03 s on an idle core
