"""Views that were written to: what autograd puts between such a view and its base.

After ``v = base.view(...); v.relu_()`` a plain tensor reaches the base through ``AsStridedBackward0``, which copies
the gradient into zeros of the base's size. Tensor subclasses, and so fake tensors, replay the view instead, which
takes no memory: ``VariableHooks::grad_fn`` in torch/csrc/autograd/variable.cpp, ``as_strided_backward`` in
FunctionsManual.cpp. The replayed nodes are remembered here, and what they return is made a copy.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from fxmem.recording.numbering import Numbering

_COPY_SLICES = "CopySlices"  # "torch::autograd::CopySlices"
_COPIES = ("Slice", "Select", "Diagonal", "AsStrided", "Unfold", "Index", "Expand")
"""Views whose backward takes memory of the base's size anyway, or sums up: nothing to add."""


class RewrittenViews:
    """Finds the nodes that were made anew for views that an operator wrote to."""

    def __init__(self, numbering: Numbering) -> None:
        self.pending: list[weakref.ref[torch.Tensor]] = []
        """Written to in the running call; autograd has not made their new node yet."""
        self._nodes: set[int] = set()
        self._numbering = numbering

    def note(self, func: Any, tensors: list[torch.Tensor]) -> None:
        """See an operator below autograd."""
        if func._schema.is_mutable and tensors and torch.is_grad_enabled() and tensors[0]._is_view():
            self.pending.append(weakref.ref(tensors[0]))

    def settle(self) -> None:
        """Let autograd make the new nodes now, above it, where it would with the next use, and remember them."""
        written, self.pending = self.pending, []
        with torch._C.DisableTorchFunction():
            for view in {id(v): v for ref in written if (v := ref()) is not None}.values():
                end = None if view._base is None else view._base.grad_fn
                if end is not None and end.name().endswith(_COPY_SLICES):
                    self._remember(view.grad_fn)

    def _remember(self, node: Any) -> None:
        first = node
        while node is not None and not node.name().endswith(_COPY_SLICES):
            if node.name().startswith(_COPIES) or not node.next_functions:
                return
            node = node.next_functions[0][0]
        if node is not None and node is not first:
            self._nodes.add(self._numbering.number(first))

    def copies(self, maker: int | None, out: Any, tensors: list[torch.Tensor]) -> bool:
        """Whether plain tensors would have ``out``, a view of the gradient, as a copy."""
        if maker not in self._nodes or not isinstance(out, torch.Tensor) or not tensors:
            return False
        return bool(out.untyped_storage()._cdata == tensors[0].untyped_storage()._cdata)
