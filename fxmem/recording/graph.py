"""The recorded calls as a ``torch.fx.Graph``: built when someone asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.shape_prop import TensorMetadata

from fxmem.recording.ledger import NODE_SHIFT, StorageNote, TensorNote
from fxmem.recording.recorder import OpNote
from fxmem.tape import Ref


def to_graph(ops: Sequence[OpNote], storages: Sequence[StorageNote]) -> fx.Graph:
    """Write the calls as nodes.

    Args:
        ops: Recorded calls in order.
        storages: Recorded storages, for the names of parameters and inputs.

    Returns:
        A graph whose ``call_function`` nodes are ATen overloads. ``node.meta`` carries
        ``tensor_meta`` (as shape propagation gives it), ``phase``, ``step``, ``module``,
        ``source`` and ``storages`` (indices of the tape's storages that it returns).
        Parameters, buffers and inputs are placeholders named after themselves.
    """
    return _Writer(storages).write(ops)


class _Writer:
    """Keeps which node made what, while one graph is written."""

    def __init__(self, storages: Sequence[StorageNote]) -> None:
        self.graph = fx.Graph()
        self.storages = storages
        self.made: dict[int, fx.Node] = {}
        self.latest: dict[int, fx.Node] = {}
        self.last_placeholder: fx.Node | None = None

    def write(self, ops: Sequence[OpNote]) -> fx.Graph:
        for i, op in enumerate(ops):
            args = tuple(self._argument(a, op) for a in op.args)
            kwargs = {k: self._argument(v, op) for k, v in op.kwargs}
            node = self.graph.call_function(op.func, args, kwargs)
            node.meta.update(
                phase=str(op.phase), step=op.step, module=op.module, source=op.source,
                storages=[n.storage for n in op.outputs],
            )  # fmt: skip
            self._outputs(i, op, node)
        self.graph.output(())
        return self.graph

    def _outputs(self, index: int, op: OpNote, node: fx.Node) -> None:
        single = len(op.outputs) == 1 and len(op.func._schema.returns) == 1
        metas = [_metadata(n) for n in op.outputs]
        node.meta["tensor_meta"] = metas[0] if single else tuple(metas)
        for note in op.outputs:
            position = note.node & ((1 << NODE_SHIFT) - 1)
            maker = node
            if not single:
                maker = self.graph.call_function(_getitem, (node, position))
                maker.meta.update(node.meta, tensor_meta=_metadata(note), storages=[note.storage])
            self.made[index << NODE_SHIFT | position] = maker
            self.latest[note.storage] = maker

    def _argument(self, value: object, op: OpNote) -> Any:
        if isinstance(value, Ref):
            return self._source(op.inputs[value.at])
        if isinstance(value, tuple):
            return [self._argument(v, op) for v in value]
        return value

    def _source(self, note: TensorNote) -> fx.Node:
        node = self.made.get(note.node) if note.node >= 0 else self.latest.get(note.storage)
        if node is None or (note.storage < 0 and note.node < 0):
            node = self._placeholder(note)
        return node

    def _placeholder(self, note: TensorNote) -> fx.Node:
        named = self.storages[note.storage].name if note.storage >= 0 else ""
        name = named.replace(".", "_").replace("[", "_").replace("]", "") or "host"
        anchor = self.last_placeholder
        where = self.graph.inserting_after(anchor) if anchor is not None else self.graph.inserting_before(self._first())
        with where:
            node = self.graph.placeholder(name)
        node.meta.update(tensor_meta=_metadata(note), storages=[note.storage])
        self.last_placeholder = node
        if note.storage >= 0:
            self.latest[note.storage] = node
        return node

    def _first(self) -> fx.Node:
        return next(iter(self.graph.nodes), self.graph._root)


def _getitem(values: Any, index: int) -> Any:
    return values[index]


def _metadata(note: TensorNote) -> TensorMetadata:
    return TensorMetadata(torch.Size(note.shape), note.dtype, False, note.stride, None, False, {})
