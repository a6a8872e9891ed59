"""The demand at any batch is that of the whole tape, number for number, whatever the rules answer."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from tape_strategies import Program, programs

from fxmem.demand import demand_law
from fxmem.kernels import Drop, Out, Step, Take, Target, expand
from fxmem.kernels.expand import RULES
from fxmem.kernels.steps import Size, numel
from fxmem.law import fit
from fxmem.liveness import live_at
from fxmem.steady import extend
from fxmem.tape import Op, Role

TARGET = Target(sm=90, sm_count=132)


def workspace(op: Op, target: Target) -> list[Step]:
    """A kept workspace, and scratch only above a size: the order of events depends on the batch."""
    scratch = 512 if numel(op.outputs[0]) > 60 else 0
    return [Take("kept", 4096, Role.WORKSPACE, keep=True), Take("scratch", scratch), Out(0), Drop("scratch")]


def resized(op: Op, target: Target) -> list[Step] | None:
    """Another size than the trace shows; nothing to say of a call without inputs."""
    return [Take("first", 8 * numel(op.outputs[0])), Size(0, 3 * numel(op.outputs[0])), Out(0)] if op.inputs else None


def aliased(op: Op, target: Target) -> list[Step]:
    """Depends on whether two inputs share a storage."""
    storages = [meta.storage for meta in op.inputs]
    return [Take("copy", 256)] if len(set(storages)) < len(storages) else []


ODD = {"activations.default": workspace, "outputs.default": workspace, "temporaries.default": resized,
       "gradients.default": aliased}  # fmt: skip


@given(programs, st.integers(1, 6), st.integers(0, 40), st.integers(0, 2))
@settings(max_examples=150)
def test_it_is_the_demand_of_the_whole_tape(program: Program, first: int, further: int, more: int) -> None:
    law = fit([program.tape(batch) for batch in (first, first + 1, first + 11)])
    steps = law.at(first).steps + more
    with patch.dict(RULES, ODD):
        found = demand_law(law, steps, TARGET)
        longer = extend(law.at(first + further), steps)
        if found is None:
            assert longer is None or extend(law.at(first), steps) is None or extend(law.at(first + 1), steps) is None
            return
        for batch in (first, first + 30, first + further):
            longer = extend(law.at(batch), steps)
            assert longer is not None
            whole = expand(longer, TARGET)
            assert found.at(batch) == whole.demand
            assert found.tape(batch) == whole
            for event in range(0, len(whole.events), 5):
                part = found.around(batch, event)
                assert [part.storages[i] for i in live_at(part, event)] == [
                    whole.storages[i] for i in live_at(whole, event)
                ]
                assert (part.events, part.step_starts) == (whole.events, whole.step_starts)
                assert [(op.name, op.start, op.stop) for op in part.ops] == [
                    (op.name, op.start, op.stop) for op in whole.ops
                ]
