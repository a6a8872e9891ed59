"""The integers of a tape, and which of them grow with the batch.

A tape falls apart into *units* (each storage, then each operator), a unit into a fixed part
(names, roles, references, ranks) and its integers (bytes, shapes, strides, offsets, arguments,
FLOPs). Two tapes of one program match if their fixed parts are equal; their integers are then
compared position by position. Floats are not compared: no size depends on them. Neither does one on
FLOPs: those on no line (attention over the batch has quadratic ones, and no quadratic memory) count 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import NamedTuple

from fxmem.tape import Op, Ref, Storage, Tape, TensorMeta


class Parts(NamedTuple):
    """A tape taken apart."""

    fixed: list[object]
    ints: list[int]
    marks: list[int]
    """Where each unit's integers begin in ``ints``; one entry more at the end."""


def take_apart(tape: Tape) -> Parts:
    """Separate what must be equal at every batch from the integers.

    Args:
        tape: The traced run.

    Returns:
        Its parts; units are the storages, then the operators.
    """
    fixed: list[object] = [tape.steps, tape.step_starts, tape.events, tape.modules, tape.training]
    ints: list[int] = []
    marks: list[int] = []
    for storage in tape.storages:
        marks.append(len(ints))
        _take_storage(storage, fixed, ints)
    for op in tape.ops:
        marks.append(len(ints))
        _take_op(op, fixed, ints)
    marks.append(len(ints))
    return Parts(fixed, ints, marks)


def rates(batches: Sequence[int], columns: Sequence[list[int]]) -> tuple[int, ...] | None:
    """Find how fast each integer grows with the batch.

    Args:
        batches: Two or more different batch sizes.
        columns: The integers at each of them, in equal order.

    Returns:
        One whole number per integer, such that all columns lie on the lines; ``None`` if some
        integer is not on a line or grows by a fraction.
    """
    base, second = columns[0], columns[1]
    span = batches[1] - batches[0]
    result = tuple((y - x) // span if x != y else 0 for x, y in zip(base, second, strict=True))
    for batch, column in zip(batches[1:], columns[1:], strict=True):
        if at_distance(base, result, batch - batches[0]) != column:
            return None
    return result


def clear_odd_flops(batches: Sequence[int], parts: Sequence[Parts], storages: int) -> None:
    """Let FLOPs that lie on no line be 0, which stands for unknown: no size depends on them.

    Args:
        batches: Those of the tapes, ascending.
        parts: The tapes; the integers of those that are like the last one are changed.
        storages: How many storages that one has: the units after those are operators, with FLOPs first.
    """
    alike = [(batch, part.ints) for batch, part in zip(batches, parts, strict=True) if part.fixed == parts[-1].fixed]
    marks = parts[-1].marks[storages:-1]
    some = [batch for batch, _ in alike[-3:]]  # enough to prove a line; batch 1 may be another program
    columns = [[ints[mark] for mark in marks] for _, ints in alike[-3:]]
    if len(some) < 2 or rates(some, columns) is not None:
        return
    for mark, own in zip(marks, zip(*columns, strict=True), strict=True):
        if rates(some, [[flops] for flops in own]) is None:
            for _, ints in alike:
                ints[mark] = 0


def at_distance(base: Sequence[int], growth: Sequence[int], distance: int) -> list[int]:
    """Move every integer along its line.

    Args:
        base: The integers at some batch.
        growth: Their rates per sample.
        distance: Samples from that batch.
    """
    return [x + rate * distance if rate else x for x, rate in zip(base, growth, strict=True)]


def put_together(tape: Tape, parts: Parts, growth: Sequence[int], batch: int) -> Tape:
    """Write the tape of another batch.

    Args:
        tape: A traced run.
        parts: Of the same tape.
        growth: Rate of each of its integers, per sample.
        batch: The batch asked for.

    Returns:
        The tape at ``batch``; units without a growing integer are shared with ``tape``.
    """
    ints = at_distance(parts.ints, growth, batch - tape.batch)
    spans = list(pairwise(parts.marks))
    split = len(tape.storages)
    storages = tuple(
        fill_storage(storage, iter(ints[begin:end])) if any(growth[begin:end]) else storage
        for storage, (begin, end) in zip(tape.storages, spans[:split], strict=True)
    )
    ops = tuple(
        fill_op(op, iter(ints[begin:end])) if any(growth[begin:end]) else op
        for op, (begin, end) in zip(tape.ops, spans[split:], strict=True)
    )
    return replace(tape, batch=batch, storages=storages, ops=ops)


def _take_storage(storage: Storage, fixed: list[object], ints: list[int]) -> None:
    shape = storage.shape
    fixed.append((storage.role, storage.dtype, storage.op, storage.name, storage.module, storage.stream, len(shape)))
    ints.append(storage.nbytes)
    ints.extend(shape)


def fill_storage(storage: Storage, ints: Iterator[int]) -> Storage:
    """Likewise for a storage, see :func:`fill_op`."""
    return replace(storage, nbytes=next(ints), shape=tuple(next(ints) for _ in storage.shape))


def _take_op(op: Op, fixed: list[object], ints: list[int]) -> None:
    fixed.append((op.name, op.step, op.phase, op.module, op.thread, op.start, op.stop, len(op.inputs), len(op.outputs)))
    ints.append(op.flops)
    for storage, shape, stride, dtype, offset in chain(op.inputs, op.outputs):
        fixed.append((storage, dtype, len(shape), len(stride)))
        ints.extend(shape)
        ints.extend(stride)
        ints.append(offset)
    _take_value(op.args, fixed, ints)
    for key, value in op.kwargs:
        fixed.append(key)
        _take_value(value, fixed, ints)


def fill_op(op: Op, ints: Iterator[int]) -> Op:
    """Put an operator's integers, in the order of :func:`take_apart`, in the place of those that it has."""
    return replace(
        op,
        flops=next(ints),
        inputs=tuple(_fill_meta(meta, ints) for meta in op.inputs),
        outputs=tuple(_fill_meta(meta, ints) for meta in op.outputs),
        args=tuple(_fill_value(value, ints) for value in op.args),
        kwargs=tuple((key, _fill_value(value, ints)) for key, value in op.kwargs),
    )


def _fill_meta(meta: TensorMeta, ints: Iterator[int]) -> TensorMeta:
    shape = tuple(next(ints) for _ in meta.shape)
    stride = tuple(next(ints) for _ in meta.stride)
    return TensorMeta(meta.storage, shape, stride, meta.dtype, next(ints))


def _take_value(value: object, fixed: list[object], ints: list[int]) -> None:
    """Walk an argument: whole numbers vary, floats are ignored, all else is fixed."""
    kind = type(value)
    if kind is int:
        fixed.append(int)
        ints.append(value)  # type: ignore[arg-type]
    elif kind is float:
        fixed.append(float)
    elif isinstance(value, tuple | list) and kind is not Ref:
        fixed.append((kind, len(value)))
        for item in value:
            _take_value(item, fixed, ints)
    else:
        fixed.append(value)


def _fill_value(value: object, ints: Iterator[int]) -> object:
    if type(value) is int:
        return next(ints)
    if isinstance(value, tuple | list) and type(value) is not Ref:
        items = [_fill_value(item, ints) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def first_difference(tapes: Sequence[Tape]) -> str:
    """Say where tapes of one program part: the operator and what differs in it.

    Args:
        tapes: Two or more, of which some two do not match or some integer is on no line.

    Returns:
        One sentence; empty if they match.
    """
    base = tapes[0]
    for other in tapes[1:]:
        found = _fixed_difference(base, other)
        if found:
            return found
    batches = [tape.batch for tape in tapes]
    # Sizes first: they are what the law is about.
    for index, storages in enumerate(zip(*(tape.storages for tape in tapes), strict=True)):
        found = _off_line(batches, [[("its size in bytes", s.nbytes), ("its shape", s.shape)] for s in storages])
        if found:
            return f"{_storage_place(base, index)}: {found}"
    for index, ops in enumerate(zip(*(tape.ops for tape in tapes), strict=True)):
        found = _off_line(batches, [list(_op_ints(op)) for op in ops])
        if found:
            return f"{_place(base, index)}: {found}"
    return ""


def _fixed_difference(one: Tape, two: Tape) -> str:
    at = (one.batch, two.batch)
    for index, (left, right) in enumerate(zip(one.ops, two.ops, strict=False)):
        if _fixed_part(left) != _fixed_part(right):
            return f"{_place(one, index)}: {_versus(_op_fields(left), _op_fields(right), at)}"
    if len(one.ops) != len(two.ops):
        longer = max(one, two, key=lambda tape: len(tape.ops))
        place = _place(longer, min(len(one.ops), len(two.ops)))
        return f"{place}: only batch {longer.batch} runs it ({len(one.ops)} and {len(two.ops)} operators)"
    for index, (mine, yours) in enumerate(zip(one.storages, two.storages, strict=False)):
        fields = _storage_fields(mine), _storage_fields(yours)
        if fields[0] != fields[1]:
            return f"{_storage_place(one, index)}: {_versus(*fields, at)}"
    for index, (here, there) in enumerate(zip(one.events, two.events, strict=False)):
        if here != there:
            return f"event {index}: {_event(here)} at batch {at[0]}, {_event(there)} at batch {at[1]}"
    return _versus(_tape_fields(one), _tape_fields(two), at)


def _fixed_part(op: Op) -> list[object]:
    fixed: list[object] = []
    _take_op(op, fixed, [])
    return fixed


def _versus(left: dict[str, object], right: dict[str, object], at: tuple[int, int]) -> str:
    for key, value in left.items():
        if value != right[key]:
            return f"{key} {_short(value)} at batch {at[0]}, {_short(right[key])} at batch {at[1]}"
    return ""


def _op_fields(op: Op) -> dict[str, object]:
    fixed: dict[str, object] = {"operator": op.name, "step": op.step, "phase": op.phase.value, "module": op.module}
    fixed |= {"thread": op.thread, "first event": op.start, "last event": op.stop}
    for label, metas in (("inputs", op.inputs), ("outputs", op.outputs)):
        fixed[label] = tuple(f"{meta.dtype} of rank {len(meta.shape)} in storage {meta.storage}" for meta in metas)
    return fixed | {"arguments": _masked(op.args), "keywords": _masked(op.kwargs)}


def _masked(value: object) -> object:
    """Hide the numbers, which may differ."""
    if isinstance(value, tuple | list) and type(value) is not Ref:
        return type(value)(_masked(item) for item in value)
    return type(value).__name__ if type(value) in (int, float) else value


def _storage_fields(storage: Storage) -> dict[str, object]:
    keys = ("role", "dtype", "op", "name", "module", "stream")
    return {key: getattr(storage, key) for key in keys} | {"rank": len(storage.shape)}


def _tape_fields(tape: Tape) -> dict[str, object]:
    counts = {"storages": len(tape.storages), "events": len(tape.events)}
    return {**counts, "steps": tape.steps, "step starts": tape.step_starts, "modules": tape.modules,
            "training": tape.training}  # fmt: skip


def _op_ints(op: Op) -> Iterator[tuple[str, object]]:
    for label, metas in (("input", op.inputs), ("output", op.outputs)):
        for index, meta in enumerate(metas):
            yield f"{label} {index}'s shape", meta.shape
            yield f"{label} {index}'s stride", meta.stride
            yield f"{label} {index}'s offset", meta.offset
    yield from ((f"argument {index}", value) for index, value in enumerate(op.args))
    yield from op.kwargs


def _off_line(batches: Sequence[int], described: Sequence[Sequence[tuple[str, object]]]) -> str:
    for fields in zip(*described, strict=True):
        columns: list[list[int]] = [[] for _ in fields]
        for (_, value), ints in zip(fields, columns, strict=True):
            _take_value(value, [], ints)
        if rates(batches, columns) is None:
            shown = ", ".join(f"{_short(value)} at batch {b}" for b, (_, value) in zip(batches, fields, strict=True))
            return f"{fields[0][0]} is {shown}: no whole number per sample"
    return ""


def _short(value: object, width: int = 120) -> str:
    text = str(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def _event(event: int) -> str:
    return f"allocates storage {event}" if event >= 0 else f"frees storage {~event}"


def _place(tape: Tape, index: int) -> str:
    op = tape.ops[index]
    return f"op {index} {op.name} in {op.module or 'the top module'}" + (f" ({op.source})" if op.source else "")


def _storage_place(tape: Tape, index: int) -> str:
    storage = tape.storages[index]
    owner = storage.name or storage.module or "the top module"
    made = _place(tape, storage.op) if storage.op is not None else f"the setup of {owner}"
    return f"storage {index} of {made}"
