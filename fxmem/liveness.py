"""When each storage lives, what is live at the peak, and which module it stands on.

Two answers to "until when": *observed*, the events of the traced eager run (Python keeps a
caller's arguments and every bound name alive), and *last use*, the end of the last operator
that touches the storage, found by walking the graph of operators and storages. The second is
what a compiled or static runtime could reach; it never exceeds the first.

Sizes are handed in, one per storage: requested bytes, or whole blocks of an allocator.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from fxmem.tape import ModuleInfo, Op, Role, Tape

if TYPE_CHECKING:
    import networkx as nx

Node = tuple[str, int]
"""``("op", i)`` or ``("storage", s)``."""

ACTIVATION_ROLES = frozenset({Role.ACTIVATION, Role.OUTPUT, Role.TEMPORARY})
"""What grows with the data that flows through the model."""

_PERSISTENT_ROLES = frozenset({Role.PARAMETER, Role.BUFFER, Role.INPUT, Role.OPTIMIZER_STATE})


class Interval(NamedTuple):
    """A half-open interval [born, dies); ``None`` means until the end."""

    born: int
    dies: int | None


class Peak(NamedTuple):
    """The first moment at which the most bytes are live.

    ``event`` is the event after which they are; -1 is the moment before the first event.
    """

    event: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetimes:
    """Both lifetimes of every storage of a tape."""

    observed: tuple[Interval, ...]
    """Of the eager run, in event indices."""
    last_use: tuple[Interval, ...]
    """In operator indices: from the operator that runs at its birth to after its last user.

    Parameters, buffers, inputs and optimizer state that the run keeps are kept here too, and an
    output lives at least until its step is over.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """What one module and everything below it accounts for."""

    path: str
    kind: str
    """The class name; empty if the tape does not list the module."""
    parameters: int
    parameter_bytes: int
    flops: int
    """Of step 1, forward and backward."""
    saved_bytes: int
    """Made in the last step and kept for its backward pass, requested bytes."""
    peak_bytes: int
    """Live at the peak, in the sizes given."""


def graph(tape: Tape) -> nx.DiGraph[Node]:
    """Build the graph of operators and storages.

    Args:
        tape: The traced run.

    Returns:
        Nodes ``("op", i)`` with ``name`` and ``phase``, and ``("storage", s)`` with ``role``; the
        numbers are indices into the tape, where the rest stands. Edges carry ``kind``:
        ``allocates`` and ``writes`` lead from an operator to a storage, ``reads`` from a storage
        to an operator. An operator that works in place has one edge each way, so the graph may
        have cycles of length two.
    """
    import networkx as nx  # a tenth of a second, which `--help` need not take

    result: nx.DiGraph[Node] = nx.DiGraph()
    storages: list[Node] = [("storage", index) for index in range(len(tape.storages))]
    ops: list[tuple[Node, Op]] = [(("op", index), op) for index, op in enumerate(tape.ops)]
    result.add_nodes_from((node, {"name": op.name, "phase": op.phase.value}) for node, op in ops)
    result.add_nodes_from(
        (node, {"role": storage.role.value}) for node, storage in zip(storages, tape.storages, strict=True)
    )
    reads = ((storages[meta[0]], node) for node, op in ops for meta in op.inputs if meta[0] >= 0)
    writes = ((node, storages[meta[0]]) for node, op in ops for meta in op.outputs if meta[0] >= 0)
    makers = ((storage.op, node) for storage, node in zip(tape.storages, storages, strict=True))
    result.add_edges_from(reads, kind="reads")
    result.add_edges_from(writes, kind="writes")
    result.add_edges_from(((ops[maker][0], node) for maker, node in makers if maker is not None), kind="allocates")
    return result


def observed(tape: Tape) -> tuple[Interval, ...]:
    """Read off the lifetimes of the eager run.

    Args:
        tape: The traced run.

    Returns:
        One interval of event indices per storage.

    Raises:
        ValueError: A storage is never allocated, or an event repeats.
    """
    births: list[int | None] = [None] * len(tape.storages)
    deaths: list[int | None] = [None] * len(tape.storages)
    for index, event in enumerate(tape.events):
        times, storage = (births, event) if event >= 0 else (deaths, ~event)
        if times[storage] is not None or (event < 0 and births[storage] is None):
            raise ValueError(f"event {index}: storage {storage} is {'freed' if event < 0 else 'allocated'} out of turn")
        times[storage] = index
    result = []
    for storage, (born, dies) in enumerate(zip(births, deaths, strict=True)):
        if born is None:
            raise ValueError(f"storage {storage} is never allocated")
        result.append(Interval(born, dies))
    return tuple(result)


def lifetimes(tape: Tape) -> Lifetimes:
    """Find both lifetimes of every storage.

    Args:
        tape: The traced run.

    Returns:
        Observed lifetimes in event indices and last-use lifetimes in operator indices.

    Raises:
        ValueError: The events are out of order (see :func:`observed`).
    """
    seen = observed(tape)
    with collector_paused():
        users = _last_users(graph(tape), len(tape.storages))
    stops = [op.stop for op in tape.ops]
    step_ends = {op.step: index + 1 for index, op in enumerate(tape.ops)}
    last_use = []
    for index, (storage, interval) in enumerate(zip(tape.storages, seen, strict=True)):
        first = bisect_right(stops, interval.born) if storage.op is None else storage.op
        end = max(first, users[index]) + 1
        if storage.role is Role.OUTPUT and storage.op is not None:
            end = max(end, step_ends[tape.ops[storage.op].step])
        kept = storage.role in _PERSISTENT_ROLES and interval.dies is None
        last_use.append(Interval(first, None if kept or end > len(stops) else end))
    return Lifetimes(observed=seen, last_use=tuple(last_use))


def live_at(tape: Tape, event: int) -> tuple[int, ...]:
    """Name the storages that are live just after an event.

    Args:
        tape: The traced run.
        event: Event index; -1 is before the first event.

    Returns:
        Storage indices, ascending.
    """
    live: set[int] = set()
    for item in tape.events[: event + 1]:
        if item >= 0:
            live.add(item)
        else:
            live.discard(~item)
    return tuple(sorted(live))


def series(tape: Tape, sizes: Sequence[int], roles: Collection[Role] | None = None) -> list[int]:
    """Sum up the live bytes over time.

    Args:
        tape: The traced run.
        sizes: Bytes per storage.
        roles: Count only storages of these roles; ``None`` counts all.

    Returns:
        Bytes live just after each event, one number per event.
    """
    counted = sizes
    if roles is not None:
        counted = [size if storage.role in roles else 0 for size, storage in zip(sizes, tape.storages, strict=True)]
    return list(accumulate(counted[event] if event >= 0 else -counted[~event] for event in tape.events))


def peak(tape: Tape, sizes: Sequence[int], roles: Collection[Role] | None = None) -> Peak:
    """Find the peak of the eager run.

    Args:
        tape: The traced run.
        sizes: Bytes per storage.
        roles: Count only storages of these roles (:data:`ACTIVATION_ROLES` for the peak of live
            activations); ``None`` counts all.

    Returns:
        The first event after which the most bytes are live, and how many. A tape on which
        nothing is ever live peaks before its first event.
    """
    return _highest(series(tape, sizes, roles))


def last_use_peak(tape: Tape, sizes: Sequence[int], lives: Lifetimes) -> Peak:
    """Find the peak if every storage were freed right after its last use.

    Args:
        tape: The traced run.
        sizes: Bytes per storage.
        lives: Of the same tape.

    Returns:
        The peak over event indices; never above :func:`peak` of the same sizes.
    """
    deltas = [0] * (len(tape.events) + 1)
    for size, seen, used in zip(sizes, lives.observed, lives.last_use, strict=True):
        deltas[seen.born] += size
        ends = [seen.dies] if used.dies is None else [seen.dies, max(tape.ops[used.dies - 1].stop, seen.born + 1)]
        known = [end for end in ends if end is not None]
        if known:
            deltas[min(known)] -= size
    return _highest(list(accumulate(deltas[:-1])))


def module_table(
    tape: Tape, depth: int | None = None, *, sizes: Sequence[int] | None = None, event: int | None = None
) -> tuple[ModuleRow, ...]:
    """Sum up parameters, FLOPs and memory per module.

    Args:
        tape: The traced run.
        depth: Longest module path to list, in names: 0 is the model alone, 1 adds its children;
            ``None`` lists all.
        sizes: Bytes per storage for ``peak_bytes``; ``None``: requested bytes.
        event: The peak's event; ``None``: the peak of ``sizes``.

    Returns:
        One row per module path up to ``depth``; a row includes all modules below it. In the
        order of ``tape.modules``, then whatever else the operators name.
    """
    used = [storage.nbytes for storage in tape.storages] if sizes is None else sizes
    moment = peak(tape, used).event if event is None else event
    flops, saved, live = Counter[str](), Counter[str](), Counter[str]()
    for op in tape.ops:
        if op.step == 1:
            flops[op.module] += op.flops
    for storage in tape.storages:
        if storage.role is Role.ACTIVATION and storage.op is not None and tape.ops[storage.op].step == tape.steps:
            saved[storage.module] += storage.nbytes
    for index in live_at(tape, moment):
        live[tape.storages[index].module] += used[index]
    totals = [_rolled_up(own) for own in (flops, saved, live)]
    infos = {info.path: info for info in tape.modules}
    return tuple(
        _row(path, infos.get(path), *(total[path] for total in totals))
        for path in dict.fromkeys(("", *infos, *totals[0], *totals[1], *totals[2]))
        if depth is None or len(_names(path)) <= depth
    )


@contextmanager
def collector_paused() -> Iterator[None]:
    """Build many small objects of which none dies: the collector would triple the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _last_users(dataflow: nx.DiGraph[Node], count: int) -> list[int]:
    """Walk the edges: the last operator beside each storage, -1 where there is none."""
    last = [-1] * count
    for (kind, tail), heads in dataflow.adjacency():
        for _, head in heads:
            op, storage = (tail, head) if kind == "op" else (head, tail)
            last[storage] = max(op, last[storage])
    return last


def _row(path: str, info: ModuleInfo | None, flops: int, saved: int, live: int) -> ModuleRow:
    return ModuleRow(
        path=path,
        kind=info.kind if info else "",
        parameters=info.parameters if info else 0,
        parameter_bytes=info.parameter_bytes if info else 0,
        flops=flops,
        saved_bytes=saved,
        peak_bytes=live,
    )


def _names(path: str) -> list[str]:
    return path.split(".") if path else []


def _rolled_up(own: Counter[str]) -> Counter[str]:
    """Credit what each module has of its own to it and to all above it."""
    total = Counter[str]()
    for path, amount in own.items():
        names = _names(path)
        for length in range(len(names) + 1):
            total[".".join(names[:length])] += amount
    return total


def _highest(values: list[int]) -> Peak:
    top = max(values, default=0)
    return Peak(values.index(top), top) if top > 0 else Peak(-1, 0)
