from __future__ import annotations

import time
from dataclasses import replace

import pytest
from tapes import TapeBuilder, mlp

from fxmem import liveness
from fxmem.liveness import Interval, Peak
from fxmem.tape import Role, Tape


def chain() -> tuple[TapeBuilder, Tape]:
    """x -> a -> b -> c, where Python holds ``a`` until after c is made; c is the output."""
    b = TapeBuilder(2)
    b.keep("w", (4,)).keep("x", (2, 4), Role.INPUT).step()
    b.op("relu.default", reads=["x", "w"], makes={"a": (2, 4)}, module="m.first", flops=10)
    b.op("relu.default", reads=["a"], makes={"b": (2, 2)}, scratch=100, module="m.second", flops=20)
    b.op("relu.default", reads=["b"], makes={"c": (1,)}, role=Role.OUTPUT, module="m.second")
    b.free("a", "b")
    b.op("item.default", reads=["w"])
    return b, b.build()


def nbytes(tape: Tape) -> list[int]:
    return [storage.nbytes for storage in tape.storages]


def test_graph_has_an_edge_for_each_allocation_write_and_read() -> None:
    b, tape = chain()
    graph = liveness.graph(tape)
    a = ("storage", b.storage("a"))
    assert graph.number_of_nodes() == len(tape.ops) + len(tape.storages)
    assert graph.edges[("op", 2), a]["kind"] == "allocates"
    assert graph.edges[a, ("op", 3)]["kind"] == "reads"
    assert graph.nodes[("op", 3)]["name"] == "relu.default"
    assert graph.nodes[a]["role"] == "temporaries"


def test_an_operator_in_place_reads_and_writes() -> None:
    tape = TapeBuilder().keep("w", (4,)).step().op("add_.Tensor", writes=["w"]).build()
    graph = liveness.graph(tape)
    assert graph.edges[("storage", 0), ("op", 1)]["kind"] == "reads"
    assert graph.edges[("op", 1), ("storage", 0)]["kind"] == "writes"


def test_observed_lifetime_follows_python_and_last_use_the_graph() -> None:
    b, tape = chain()
    lives = liveness.lifetimes(tape)
    a, c, w = b.storage("a"), b.storage("c"), b.storage("w")
    assert lives.observed[a] == Interval(2, 7)
    assert lives.last_use[a] == Interval(2, 4)
    assert lives.observed[w] == lives.last_use[w] == Interval(0, None)
    assert lives.last_use[c] == Interval(4, 6), "an output lives until its step ends"


def test_a_host_tensor_is_in_no_graph() -> None:
    _, tape = chain()
    host = tape.ops[2].inputs[0]._replace(storage=-1)
    changed = replace(tape, ops=(*tape.ops[:2], replace(tape.ops[2], inputs=(host,)), *tape.ops[3:]))
    assert liveness.graph(changed).in_degree(("op", 2)) == 0


def test_peak_is_the_first_highest_moment() -> None:
    b, tape = chain()
    # w 16, x 32, a 32, scratch 100, b 16
    assert liveness.peak(tape, nbytes(tape)) == Peak(4, 196)
    assert liveness.live_at(tape, 4) == (0, 1, 2, 3, b.storage("b"))
    assert liveness.peak(tape, nbytes(tape), liveness.ACTIVATION_ROLES) == Peak(6, 52)


def test_last_use_peak_drops_what_python_only_holds() -> None:
    b = TapeBuilder().step()
    b.op("a.default", makes={"a": (100,)}).op("b.default", reads=["a"], makes={"b": (1,)})
    b.op("c.default", reads=["b"], makes={"c": (50,)}).free("a")
    tape = b.build()
    lives = liveness.lifetimes(tape)
    assert liveness.peak(tape, nbytes(tape)).nbytes == 604
    assert liveness.last_use_peak(tape, nbytes(tape), lives).nbytes == 404


def test_an_empty_tape_peaks_before_its_first_event() -> None:
    tape = TapeBuilder().build()
    assert liveness.peak(tape, []) == Peak(-1, 0)
    assert liveness.live_at(tape, -1) == ()
    assert liveness.lifetimes(tape).observed == ()


@pytest.mark.parametrize("events", [(), (0, 0), (~0,), (0, ~0, ~0)])
def test_events_out_of_turn_are_refused(events: tuple[int, ...]) -> None:
    whole = TapeBuilder().keep("w", (1,)).build()
    tape = Tape(batch=1, steps=0, storages=whole.storages, ops=(), events=events, step_starts=())
    with pytest.raises(ValueError, match="storage 0"):
        liveness.observed(tape)


def test_module_table_sums_up_what_lies_below() -> None:
    _, tape = chain()
    rows = {row.path: row for row in liveness.module_table(tape)}
    assert list(rows) == ["", "m", "m.first", "m.second"]
    assert rows["m"].flops == rows[""].flops == 30
    assert rows["m.second"].peak_bytes == 116
    assert rows[""].peak_bytes == 196
    assert [row.path for row in liveness.module_table(tape, 1)] == ["", "m"]


def test_module_table_of_training_lists_saved_bytes_of_the_last_step() -> None:
    rows = {row.path: row for row in liveness.module_table(mlp(4), 1)}
    assert rows[""].kind == "MLP"
    assert rows[""].parameters == 96
    assert rows["fc1"].saved_bytes == 4 * 8 * 4
    assert rows["fc1"].flops == 2 * 2 * 4 * 8 * 8
    assert rows["fc2"].saved_bytes == 0


def test_a_long_tape_is_quick() -> None:
    b = TapeBuilder().step()
    b.op("relu.default", makes={"t0": (4,)})
    for index in range(1, 20_000):
        b.op("relu.default", reads=[f"t{index - 1}"], makes={f"t{index}": (4,)}).free(f"t{index - 1}")
    tape = b.build()
    start = time.process_time()
    liveness.lifetimes(tape)
    liveness.peak(tape, nbytes(tape))
    assert time.process_time() - start < 2.0  # 0.3 s on an idle core; the room is for loaded machines
