"""More steps of a tape without running them: once a step repeats, it repeats for ever.

A deterministic program whose state after step k is the state before it, storage for storage,
does in step k + 1 what it did in step k. The state is what lives across the boundary.
"""

from __future__ import annotations

from dataclasses import replace

from fxmem.tape import Op, Storage, Tape, TensorMeta


def extend(tape: Tape, steps: int) -> Tape | None:
    """Repeat the last step until there are ``steps``.

    Args:
        tape: At least two recorded steps.
        steps: Steps wanted, at least as many as recorded.

    Returns:
        The longer tape, or ``None`` if the last step does not leave the state it found.
    """
    while tape.steps < steps:
        longer = _repeated(tape)
        if longer is None:
            return None
        tape = longer
    return tape


def _repeated(tape: Tape) -> Tape | None:
    start = tape.step_starts[-1]
    before = _alive(tape.events[:start])
    after = _alive(tape.events)
    born = [e for e in tape.events[start:] if e >= 0]
    left, came = sorted(before - after), [s for s in born if s in after]
    twins = _twins(tape, left, came)
    if twins is None:
        return None
    count = len(tape.storages)
    renamed = {s: count + i for i, s in enumerate(born)}
    renamed.update(twins)  # what step k freed of its predecessor, step k + 1 frees of step k
    first_op = next((i for i, op in enumerate(tape.ops) if op.step == tape.steps), len(tape.ops))
    shift, op_shift = len(tape.events) - start, len(tape.ops) - first_op
    events = [renamed.get(e, e) if e >= 0 else ~renamed.get(~e, ~e) for e in tape.events[start:]]
    storages = tuple(_moved(tape.storages[s], op_shift) for s in born)
    metas: dict[TensorMeta, TensorMeta] = {}
    ops = tuple(_again(op, shift, renamed, metas) for op in tape.ops[first_op:])
    return replace(
        tape, steps=tape.steps + 1, storages=tape.storages + storages, ops=tape.ops + ops,
        events=(*tape.events, *events), step_starts=(*tape.step_starts, len(tape.events)),
    )  # fmt: skip


def _alive(events: tuple[int, ...]) -> set[int]:
    alive: set[int] = set()
    for e in events:
        if e >= 0:
            alive.add(e)
        else:
            alive.discard(~e)
    return alive


def _twins(tape: Tape, left: list[int], came: list[int]) -> dict[int, int] | None:
    """Pair each storage that the last step freed of the state with the one that took its place."""
    if len(left) != len(came):
        return None
    twins = {}
    for old, new in zip(left, came, strict=True):
        a, b = tape.storages[old], tape.storages[new]
        if (a.nbytes, a.shape, a.dtype, a.role, a.module) != (b.nbytes, b.shape, b.dtype, b.role, b.module):
            return None
        twins[old] = new
    return twins


def _moved(storage: Storage, op_shift: int) -> Storage:
    return replace(storage, op=None if storage.op is None else storage.op + op_shift)


def _again(op: Op, shift: int, renamed: dict[int, int], metas: dict[TensorMeta, TensorMeta]) -> Op:
    def other(meta: TensorMeta) -> TensorMeta:
        if meta not in metas:
            metas[meta] = meta._replace(storage=renamed.get(meta.storage, meta.storage))
        return metas[meta]

    return replace(
        op, step=op.step + 1, start=op.start + shift, stop=op.stop + shift,
        inputs=tuple([other(m) for m in op.inputs]), outputs=tuple([other(m) for m in op.outputs]),
    )  # fmt: skip
