"""Backward nodes in the order in which CUDA's engine takes them: its thread counts the nodes it makes by itself.

Of the nodes that are ready, the engine runs the one with the highest sequence number (``CompareNodeTaskTime`` in
torch/csrc/autograd/engine.h), and each thread counts from zero (aten/src/ATen/SequenceNumber.cpp). On the CPU the
engine runs in the caller's thread: a gradient that is taken with ``create_graph`` leaves nodes with numbers above
all that were there, where the device's thread would have given them its own, low ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

import torch

_MADE_AS = "fxmem: made as"
_peek: Callable[[], int] = torch._C._autograd._get_sequence_nr


class Numbering:
    """Gives nodes that the engine makes the numbers that they would have on CUDA, from now on."""

    def __init__(self) -> None:
        self.changed = False
        """Whether any node has another number than the one it was made with."""
        self._engine = 0
        self._depth = 0
        self._begins = [_peek()]
        """Number at which the main thread goes on after each run of the engine."""
        self._before = [0]
        """How many nodes it had made by then."""

    def number(self, node: Any) -> int:
        """The number that ``node`` was made with: it identifies the node."""
        made: int | None = node.metadata.get(_MADE_AS) if self.changed else None
        return int(node._sequence_nr()) if made is None else made

    def run(self, engine: Callable[[], Any], outputs: Sequence[Any]) -> Any:
        """Run the engine, from ``outputs`` on."""
        start = _peek()
        self._depth += 1
        try:
            result = engine()
        finally:
            self._depth -= 1
        end = _peek()
        if not self._depth and end > start:  # what a run inside a run makes is the same thread's
            gradients = result or _accumulated(outputs)
            self._renumber([g.grad_fn for g in gradients if g is not None and g.grad_fn is not None], start, end)
            self._engine += end - start
            self._before.append(self._before[-1] + start - self._begins[-1])
            self._begins.append(end)
        return result

    def _renumber(self, nodes: list[Any], start: int, end: int) -> None:
        while nodes:
            node = nodes.pop()
            number = node._sequence_nr()
            if not start <= number < end or _MADE_AS in node.metadata or not hasattr(node, "_set_sequence_nr"):
                continue
            nodes += _earlier(node)
            node.metadata[_MADE_AS] = number
            node._set_sequence_nr(self._main(self._engine + number - start))
            self.changed = True

    def _main(self, count: int) -> int:
        """The number of the node that the main thread makes as its ``count``-th, as far as it is known."""
        at = bisect_right(self._before, count) - 1
        return self._begins[at] + count - self._before[at]


def _earlier(node: Any) -> list[Any]:
    return [one for one, _ in node.next_functions if one is not None]


def _accumulated(outputs: Sequence[Any]) -> list[torch.Tensor | None]:
    """The gradients of all leaves that ``outputs`` were made from."""
    nodes = [t.grad_fn for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen: set[Any] = set()
    gradients = []
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        nodes += _earlier(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            gradients.append(leaf.grad)
    return gradients
