"""Where autograd treats tensor subclasses otherwise than plain tensors, and what a plain one does.

Fake tensors are subclasses, so autograd takes the out-of-place form of some formulas, which
allocates what a CUDA run does not. :func:`donor` finds the storage that the plain form would
have written into.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

from fxmem.recording.ledger import HOST, NODE_SHIFT, StorageNote, TensorNote

aten = torch.ops.aten

# Use counts that a tensor held by C++ alone shows inside ``__torch_dispatch__``: the holder,
# the argument stack and the Python wrapper. A name in Python holds it once less (through the
# wrapper), so that such tensors are told apart.
_OWNED_TENSOR = 4
_OWNED_STORAGE = 2

_WRITES_INTO_FRESH = frozenset(
    (
        aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.index_put.default, aten.index_add.default,
        aten.masked_fill.Scalar, aten.masked_fill.Tensor,
    )
)  # fmt: skip
"""``areAnyTensorSubclassLike`` in torch/csrc/autograd/FunctionsManual.cpp: in place for plain tensors
(``value_selecting_reduction_backward``, ``gather_backward``, ``index_backward``, ...)."""

_PLAIN_IN = ("Xlogy", "SpecialXlog1", "ScatterReduce", "IndexReduce")
"""Formulas that call one of them out of place for all tensors."""

_BY_NAME = (aten.index_put.default, aten.masked_fill.Scalar, aten.masked_fill.Tensor)
"""Of these, those whose formula may hold the argument by name while it calls (``index_backward``, ``maximum``)."""

_FORMULAS = {
    "BinaryCrossEntropyWithLogitsBackward0": frozenset((aten.sub.Tensor, aten.mul.Tensor)),
    "BinaryCrossEntropyBackward0": frozenset((aten.mul.Tensor,)),
    "MaxBackward1": frozenset((aten.logical_and.default, aten.logical_or.default)),
    "MinBackward1": frozenset((aten.logical_and.default, aten.logical_or.default)),
    "MaskedSelectBackward0": frozenset((aten.masked_scatter.default,)),
    "TraceBackward0": frozenset((aten.index_fill.int_Scalar,)),
}
"""Likewise for some formulas alone: ``binary_cross_entropy_with_logits_backward``, ``evenly_distribute_backward``,
``binary_cross_entropy_target_backward``."""

_FRESH_OR_FORMULA = _WRITES_INTO_FRESH.union(*_FORMULAS.values())

_BETWEEN = ("fxmem.recording", "torch._dynamo", "torch._compile", "torch.utils._python_dispatch")
"""Whose frames may lie between a call and the recorder."""

_PRODUCTS = frozenset((aten.mm.default, aten.bmm.default, aten.view.default, aten._unsafe_view.default))


def donor(
    func: Any, tensors: list[torch.Tensor], notes: tuple[TensorNote, ...], maker: int | None,
    storages: list[StorageNote], producer: Any,
) -> torch.UntypedStorage | None:  # fmt: skip
    """The storage that ``func`` on plain tensors would write its result into.

    Args:
        func: The call.
        tensors: Its tensor arguments.
        notes: The same as noted.
        maker: Sequence number of the running backward node, ``None`` outside the engine.
        storages: All storages.
        producer: The call just before, if it returned the first argument.
    """
    if notes[0].storage == HOST:
        return None
    engine = maker is not None and (func is aten.add.Tensor or func in _FRESH_OR_FORMULA) and _called_by_engine()
    fresh = storages[notes[0].storage].maker == maker
    if func is aten.add.Tensor:
        # The engine adds gradients up at a join, into the first one's buffer when nothing else holds it and
        # no graph is made: ``accumulate`` in torch/csrc/autograd/input_buffer.cpp. at::linear adds the bias
        # in place (aten/src/ATen/native/Linear.cpp, isTensorSubclassLike).
        joins = not (fresh and engine) or _meets_itself()
        wanted = len(tensors) == 2 and (joins and not torch.is_grad_enabled() if engine else producer in _PRODUCTS)
    else:
        wanted = engine and fresh and _in_formula(func, producer)
    if not wanted:
        return None
    first = tensors[0]
    storage = first.untyped_storage()
    if not owned(storage):
        return None
    held = first._use_count()  # type: ignore[attr-defined]
    if func in _BY_NAME:
        held -= 1
    least = 0 if engine else _OWNED_TENSOR  # in a forward pass a name in Python would hold it less often
    if not least <= held <= _OWNED_TENSOR:
        return None
    return storage if _dense(first) else None


def owned(storage: torch.UntypedStorage) -> bool:
    """Whether one tensor alone has the storage, apart from the caller's ``storage``."""
    return torch._C._storage_Use_Count(storage._cdata) <= _OWNED_STORAGE


def _called_by_engine() -> bool:
    """Whether C++ makes the call: no Python of a custom backward, of a hook or of a checkpoint stands between."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _meets_itself() -> bool:
    """Whether two gradients of the running node meet (``x * x``); else what it made is added up in its formula."""
    edges = torch._C._current_autograd_node().next_functions
    return len(set(edges)) < len(edges)


def _in_formula(func: Any, producer: Any) -> bool:
    """Whether the running node's formula writes; two are exceptions: ``xlogy`` and the gradient of a loss's target."""
    name = torch._C._current_autograd_node().name()
    if func in _WRITES_INTO_FRESH:
        return not name.startswith(_PLAIN_IN)
    return func in _FORMULAS.get(name, ()) and producer is not aten.neg.default  # ``-self * grad``


def producer_of(note: TensorNote) -> int:
    """Index of the operator that returned the tensor, -1 if none did."""
    return note.node >> NODE_SHIFT if note.node >= 0 else -1


def _dense(t: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlap."""
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
