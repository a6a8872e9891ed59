"""Hypothesis strategies: small random programs that give a tape at every batch."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st
from tapes import TapeBuilder

from fxmem.tape import Phase, Role, Tape

Dim = tuple[int, int]
"""A size ``fixed + slope * batch``."""


class Call(NamedTuple):
    """One operator: reads what is live, makes one tensor, then frees what is live."""

    dims: tuple[Dim, ...]
    role: Role
    module: str
    reads: tuple[int, ...]
    frees: tuple[int, ...]
    scratch: Dim
    frees_inside: bool


class Program(NamedTuple):
    """Calls, and how many of them run before each step."""

    setup: tuple[Dim, ...]
    steps: tuple[tuple[Call, ...], ...]

    def tape(self, batch: int) -> Tape:
        """Run it."""
        builder, live, count = TapeBuilder(batch, training=True), [], 0
        for index, dim in enumerate(self.setup):
            builder.keep(f"p{index}", (_size(dim, batch),), Role.PARAMETER)
            live.append(f"p{index}")
        for step in self.steps:
            builder.step()
            for call in step:
                name, count = f"t{count}", count + 1
                reads = [live[at % len(live)] for at in call.reads] if live else []
                dead = [live.pop(at % len(live)) for at in call.frees if live]
                builder.op(
                    f"{call.role.value}.default",
                    reads=reads,
                    makes={name: tuple(_size(dim, batch) for dim in call.dims)},
                    role=call.role,
                    module=call.module,
                    phase=Phase.FORWARD if call.role is Role.ACTIVATION else Phase.BACKWARD,
                    scratch=_size(call.scratch, batch),
                    frees=dead if call.frees_inside else (),
                    args=(batch, ("eps", 1e-5, True), [3 * batch + 1, None]),
                    kwargs=(("size", (batch, 4)),),
                    flops=7 * batch,
                )
                if not call.frees_inside:
                    builder.free(*dead)
                live.append(name)
        return builder.build()


def _size(dim: Dim, batch: int) -> int:
    return dim[0] + dim[1] * batch


dims = st.tuples(st.integers(0, 40), st.integers(0, 3))
calls = st.builds(
    Call,
    dims=st.lists(dims, max_size=1).map(tuple),
    role=st.sampled_from([Role.ACTIVATION, Role.OUTPUT, Role.TEMPORARY, Role.GRADIENT, Role.OPTIMIZER_STATE]),
    module=st.sampled_from(["", "a", "a.b", "c.d.e"]),
    reads=st.lists(st.integers(0, 50), max_size=3).map(tuple),
    frees=st.lists(st.integers(0, 50), max_size=2).map(tuple),
    scratch=st.tuples(st.sampled_from([0, 16]), st.just(0)),
    frees_inside=st.booleans(),
)
programs = st.builds(
    Program,
    setup=st.lists(dims, max_size=3).map(tuple),
    steps=st.lists(st.lists(calls, max_size=8).map(tuple), min_size=1, max_size=3).map(tuple),
)
