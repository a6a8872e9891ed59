"""The largest batch, on hand-made tapes: search, proof, limits, and programs without a law."""

from __future__ import annotations

from dataclasses import replace

import pytest
from budgets import attention
from tapes import TapeBuilder, mlp

from fxmem.allocator import AllocatorConfig, replay, shortage
from fxmem.batch import Bound, Limits, largest
from fxmem.errors import TraceError, UsageError
from fxmem.kernels import Target, expand
from fxmem.law import fit, with_kernels
from fxmem.program import MAX_BATCH, Tapes, VariedTapes
from fxmem.steady import extend
from fxmem.tape import Phase, Role, Tape

MIB = 2**20
TARGET = Target(sm=90, sm_count=132)
CONFIG = AllocatorConfig()


def chain(batch: int, *, width: int = MIB, layers: int = 4) -> Tape:
    """Keep a 32 MiB weight and hold each layer's output for a backward pass: 4 MiB a sample and layer."""
    b = TapeBuilder(batch, training=True).keep("w", (8 * MIB,))
    for _ in (1, 2):
        b.step()
        for layer in range(layers):
            b.op("mm.default", reads=["w"], makes={f"h{layer}": (batch, width)}, role=Role.ACTIVATION,
                 module=f"layer{layer}")  # fmt: skip
        for layer in reversed(range(layers)):
            b.op("mm.default", reads=[f"h{layer}"], makes={"g": (batch, width)}, phase=Phase.BACKWARD,
                 frees=[f"h{layer}"], module=f"layer{layer}")  # fmt: skip
            b.free("g")
    return b.build()


def limits(mib: float, **changes) -> Limits:
    return Limits(**{"capacity_bytes": int(mib * MIB), "safety": 1.0, **changes})


def tapes(make=chain, batches=(2, 3, 4), **changes) -> Tapes:
    traced = [make(batch) for batch in batches]
    return Tapes(with_kernels(fit(traced), [expand(tape, TARGET) for tape in traced]), 3, TARGET, **changes)


def brute_force(make, room: int) -> int:
    """Probe one batch after the other, as one would on a GPU."""
    batch = 1
    while True:
        longer = extend(make(batch), 3)
        assert longer is not None
        if replay(expand(longer, TARGET), CONFIG, room).oom is not None:
            return batch - 1
        batch += 1


@pytest.mark.parametrize("mib", [120, 150, 333, 1000, 1234])
def test_it_is_what_probing_finds(mib):
    answer = largest(tapes(batches=(1, 2, 3)), CONFIG, limits(mib))
    assert answer.batch == brute_force(chain, mib * MIB) > 0
    assert answer.proved
    assert 0 <= answer.margin_bytes == mib * MIB - answer.reserved_bytes


def test_the_answer_fits_and_the_next_does_not():
    program = tapes()
    answer = largest(program, CONFIG, limits(5000))
    assert answer.next is not None
    assert (answer.next.batch, answer.traces) == (answer.batch + 1, 0)
    fitting, failing = program.at(answer.batch), program.at(answer.batch + 1)
    assert replay(fitting, CONFIG, 5000 * MIB).oom is None
    assert replay(failing, CONFIG, 5000 * MIB).oom is not None
    short = answer.next
    assert short.requested_bytes == 4 * MIB * short.batch
    assert (short.at.step, short.at.phase, short.at.module) == (1, Phase.BACKWARD, "layer3")
    assert short.at.source
    assert short.at.tensors[0].bytes == short.requested_bytes
    assert short.reserved_bytes + short.requested_bytes >= 5000 * MIB + short.missing_bytes - 2 * MIB


def test_the_textbook_formula_where_the_law_has_one_piece():
    """Safe batch = (available x safety - fixed) / per sample."""
    program = tapes()
    (piece,) = program.law.pieces()
    answer = largest(program, CONFIG, limits(8000, safety=0.8))
    assert answer.batch == (int(8000 * MIB * 0.8) - piece.fixed_bytes) // piece.per_sample_bytes


def test_nothing_fits():
    answer = largest(tapes(batches=(1, 2, 3)), CONFIG, limits(40))
    assert (answer.batch, answer.proved, answer.reserved_bytes) == (0, True, 0)
    assert answer.next is not None
    assert answer.next.batch == 1


def test_the_context_takes_all():
    answer = largest(tapes(), CONFIG, limits(400, context_bytes=500 * MIB))
    assert (answer.batch, answer.proved, answer.next) == (0, True, None)
    assert "leave nothing" in answer.notes[0]


def test_memory_that_does_not_grow_limits_nothing():
    answer = largest(tapes(lambda batch: replace(chain(1), batch=batch)), CONFIG, limits(1000))
    assert answer.batch == MAX_BATCH
    assert answer.next is None
    assert "memory does not limit it" in answer.notes[0]


@pytest.mark.parametrize("unit", [2, 8, 7])
def test_multiples(unit):
    one = largest(tapes(), CONFIG, limits(3000))
    answer = largest(tapes(), CONFIG, limits(3000), unit)
    assert answer.batch == one.batch // unit * unit
    assert answer.next is not None
    assert answer.next.batch == answer.batch + unit


def test_limits():
    given = Limits(capacity_bytes=1000 * MIB, context_bytes=100 * MIB, reserve_bytes=200 * MIB, safety=0.5, processes=2)
    assert given.allocator_bytes == 100 * MIB
    assert Limits(capacity_bytes=1000).allocator_bytes == 900


@pytest.mark.parametrize("wrong", [{"safety": 0.0}, {"safety": 1.1}, {"reserve_bytes": -1}, {"processes": 0}])
def test_limits_out_of_range(wrong):
    with pytest.raises(UsageError):
        limits(1, **wrong)
    with pytest.raises(UsageError, match="--multiple-of"):
        largest(tapes(), CONFIG, limits(100), 0)


def test_other_limits_reuse_the_tapes():
    program = tapes()
    first = largest(program, CONFIG, limits(3000))
    again = largest(program, CONFIG, limits(3000))
    assert first == again
    assert largest(program, CONFIG, limits(2000)).batch < first.batch


def uneven(batch: int) -> Tape:
    """A program whose sizes lie on no line."""
    return chain(batch, width=MIB + 4096 * (batch // 3))


def test_without_a_law_each_batch_is_traced():
    seen = []

    def trace(batch: int) -> Tape | None:
        seen.append(batch)
        return extend(uneven(batch), 3)

    program = tapes(uneven, trace=trace)
    assert not program.law.exact
    answer = largest(program, CONFIG, limits(4000))
    assert answer.proved
    assert answer.batch == brute_force(uneven, 4000 * MIB)
    assert program.traced == seen
    assert answer.traces == len(seen) <= 8
    assert any("no batch law" in note for note in answer.notes)


def test_a_limit_of_traces():
    answer = largest(tapes(uneven, trace=lambda batch: extend(uneven(batch), 3), limit=1), CONFIG, limits(4000))
    assert (answer.proved, answer.bound, answer.traces) == (False, Bound.UNKNOWN, 1)
    assert any("was not traced" in note for note in answer.notes)


def test_a_limit_of_time():
    answer = largest(tapes(quadratic, trace=traced_up_to(), seconds=1e-9), CONFIG, limits(4000))
    assert (answer.proved, answer.traces) == (False, 1)
    assert answer.batch >= 4


def traced_up_to(last=MAX_BATCH, make=None):
    """Trace a program that raises above some batch, as one with a table of positions does."""

    def trace(batch: int) -> Tape:
        if batch > last:
            raise TraceError("index out of range")
        return extend((make or quadratic)(batch), 3)

    return trace


def quadratic(batch: int) -> Tape:
    """Scores of each sample with each other, kept for a backward pass."""
    b = TapeBuilder(batch, training=True).keep("w", (8 * MIB,))
    for _ in (1, 2):
        b.step()
        b.op("mm.default", reads=["w"], makes={"h": (batch, 512), "s": (batch, batch)}, role=Role.ACTIVATION)
        b.op("mm.default", reads=["s"], makes={"g": (batch, batch)}, phase=Phase.BACKWARD, frees=["h", "s"]).free("g")
    return b.build()


@pytest.mark.parametrize("start", [1, 13, 4096, 1_000_000])
@pytest.mark.parametrize("mib", [120, 800, 24_000])
def test_memory_that_is_quadratic_in_the_batch(start, mib):
    program = tapes(quadratic, batches=(2, 3, 13), trace=traced_up_to(), start=start)
    answer = largest(program, CONFIG, limits(mib))
    assert (answer.proved, answer.bound) == (True, Bound.MEMORY)
    for batch, fits in ((answer.batch, True), (answer.batch + 1, False)):
        demand = expand(extend(quadratic(batch), 3), TARGET)
        assert (replay(demand, CONFIG, mib * MIB).oom is None) is fits
    assert answer.traces <= 8


def test_what_was_traced_and_fits_is_never_none():
    for limit in range(8):
        program = tapes(quadratic, batches=(2, 3, 13), trace=traced_up_to(), start=100_000, limit=limit)
        answer = largest(program, CONFIG, limits(800))
        assert answer.batch >= 13
        assert answer.proved or any(f"fits at {answer.batch}" in note for note in answer.notes)
    assert answer.proved
    program = tapes(quadratic, batches=(2, 3, 13), trace=traced_up_to(), start=100_000, limit=1)
    answer = largest(program, CONFIG, limits(800))
    assert "it does not fit at 100000" in answer.notes[0]
    assert answer.next is not None
    assert answer.next.batch == 100_000


def forked(batch: int) -> Tape:
    """Takes another way at every third batch, so that no curve can lead."""
    b = TapeBuilder(batch)
    for _ in (1, 2):
        b.step()
        names = [f"x{index}" for index in range(1 + batch % 3)]
        for name in names:
            b.op("mm.default", makes={name: (batch, batch)})
        b.free(*names)
    return b.build()


@pytest.mark.parametrize("start", [1, 4096, 1_000_000])
@pytest.mark.parametrize("mib", [60, 800, 4000, 24_000])
def test_without_a_curve_the_bracket_is_halved(start, mib):
    program = tapes(forked, batches=(2, 3, 13), trace=traced_up_to(make=forked), start=start)
    answer = largest(program, CONFIG, limits(mib))
    assert answer.proved
    assert answer.traces <= 22


def test_several_limits_share_the_traces():
    program = tapes(quadratic, batches=(2, 3, 13), trace=traced_up_to())
    first = largest(program, CONFIG, limits(800))
    again = largest(program, CONFIG, limits(800))
    assert (again.batch, again.traces) == (first.batch, first.traces)


def test_a_program_that_does_not_run():
    answer = largest(tapes(uneven, batches=(2, 3), trace=traced_up_to(0)), CONFIG, limits(4000))
    assert (answer.batch, answer.proved, answer.bound) == (3, True, Bound.PROGRAM)
    assert any("batch 4 and more do not run: index out of range" in note for note in answer.notes)


def test_a_program_that_does_not_run_beyond():
    program = tapes(uneven, trace=traced_up_to(7, uneven), limit=20)
    answer = largest(program, CONFIG, limits(4000))
    assert (answer.batch, answer.proved, answer.bound, answer.next) == (7, True, Bound.PROGRAM, None)
    assert any("batch 8 and more do not run: index out of range" in note for note in answer.notes)


def test_what_does_not_run_at_one_sample_does_not_bound_the_rest():
    program = tapes(quadratic, batches=(2, 3, 13), trace=traced_up_to(0))
    for _ in range(2):
        answer = largest(program, CONFIG, limits(20))
        assert (answer.batch, answer.proved, answer.bound) == (0, True, Bound.MEMORY)
        assert any("batch 1 does not run" in note for note in answer.notes)


def test_a_batch_below_the_law_is_traced():
    answer = largest(tapes(batches=(3, 4, 5), trace=lambda batch: extend(chain(batch), 3)), CONFIG, limits(120))
    assert (answer.batch, answer.proved) == (brute_force(chain, 120 * MIB), True)
    assert answer.traces


def test_shortage_is_replay():
    tape = mlp(64, width=4096)
    requests = [(storage.nbytes, storage.stream) for storage in tape.storages]
    for mib in (2, 22, 40, 60):
        assert shortage(tape.events, requests, CONFIG, mib * MIB) == replay(tape, CONFIG, mib * MIB).oom


def test_along_another_axis_memory_is_a_parabola():
    seen = []

    def trace(seq: int) -> Tape | None:
        seen.append(seq)
        return attention(2, seq)

    program = VariedTapes("seq", (16, 4096), TARGET, trace)
    answer = largest(program, CONFIG, limits(1024))
    assert answer.axis == "seq"
    assert replay(expand(attention(2, answer.batch), TARGET), CONFIG, 1024 * MIB).oom is None
    assert replay(expand(attention(2, answer.batch + 1), TARGET), CONFIG, 1024 * MIB).oom is not None
    assert seen == [16, 32, 64, answer.batch, answer.batch + 1] == program.traced
    assert any("proved by one" in note for note in answer.notes)


def test_a_range_that_fits_whole_or_not_at_all():
    whole = largest(VariedTapes("seq", (16, 99), TARGET, lambda seq: attention(2, seq)), CONFIG, limits(1024))
    assert (whole.batch, whole.proved, whole.next, whole.bound) == (99, True, None, Bound.RANGE)
    assert any("the end of the range, widen it" in note for note in whole.notes)
    none = largest(VariedTapes("seq", (500, 900), TARGET, lambda seq: attention(2, seq)), CONFIG, limits(50))
    assert (none.batch, none.proved) == (0, True)
    assert none.next is not None
    assert none.next.batch == 500


@pytest.mark.parametrize("last", [17, 100, 1024, 1025])
def test_a_range_beyond_what_runs(last):
    def trace(seq: int) -> Tape:
        if seq > last:
            raise TraceError("index out of range")
        return attention(2, seq)

    program = VariedTapes("seq", (16, 8192), TARGET, trace)
    answer = largest(program, CONFIG, limits(4000))
    assert (answer.batch, answer.proved, answer.bound, answer.next) == (last, True, Bound.PROGRAM, None)
    assert f"seq {last + 1} and more do not run: index out of range" in answer.notes
    assert answer.traces <= 18


def test_what_is_wrong_at_every_value_is_raised():
    def trace(seq: int) -> Tape:
        raise UsageError("seq changes nothing here")

    with pytest.raises(UsageError):
        largest(VariedTapes("seq", (16, 8192), TARGET, trace), CONFIG, limits(4000))


def test_lines_and_parabolas():
    program = VariedTapes("seq", (1, 99), TARGET, lambda seq: attention(1, seq))
    assert program.line(30) is None
    for seq in (10, 20, 40):
        program.at(seq)
    curve = program.line(30)
    assert curve is not None
    wanted = expand(attention(1, 77), TARGET)
    assert curve.requests(77) == [(storage.nbytes, storage.stream) for storage in wanted.storages]
