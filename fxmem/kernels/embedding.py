"""Backward passes of embeddings: indices sorted, cut into segments of ten, summed in float32.

Mirrors aten/src/ATen/native/cuda/{Embedding,EmbeddingBag,EmbeddingBackwardKernel}.cu of torch 2.14.
"""

from __future__ import annotations

from fxmem.kernels import cub
from fxmem.kernels.copies import copy
from fxmem.kernels.steps import (
    Drop,
    Out,
    Rule,
    Size,
    Step,
    Take,
    Target,
    argument,
    itemsize,
    launch_scratch,
    nbytes,
    numel,
    tensor,
)
from fxmem.tape import Op, TensorMeta

_ROWS_PER_THREAD = 10
"""``NROWS_PER_THREAD``."""

_SMALL = 3072
"""Indices up to which the gradient is summed without sorting."""

_MAX_MODE = 2
"""``EmbeddingBagMode::MAX``."""


def _dense_backward(op: Op, target: Target) -> list[Step] | None:
    """``embedding_dense_backward_cuda`` (Embedding.cu)."""
    grad, indices = tensor(op, 0), tensor(op, 1)
    weights, by_frequency = argument(op, 2, "num_weights"), bool(argument(op, 4, "scale_grad_by_freq"))
    if grad is None or indices is None or not isinstance(weights, int):
        return None
    steps = copy("indices", indices) + copy("grad", grad)
    if numel(indices) <= _SMALL and not by_frequency:
        return [*steps, Out(0)]
    return steps + _sorted_backward(grad, indices, weights, target, by_frequency=by_frequency)


def _bag_backward(op: Op, target: Target) -> list[Step] | None:
    """``_embedding_bag_dense_backward_cuda`` (EmbeddingBag.cu), alone or from ``_embedding_bag_backward``."""
    grad, indices = tensor(op, 0), tensor(op, 1)
    first = 6 if op.name == "_embedding_bag_backward.default" else 5  # the one has the offsets as well
    weights, mode = argument(op, first, "num_weights"), argument(op, first + 2, "mode")
    if first == 6 and argument(op, 9, "sparse"):
        return None
    if grad is None or indices is None or not isinstance(weights, int):
        return None
    before = copy("grad", grad)
    if mode == _MAX_MODE:
        return [*before, Out(0)]
    if not numel(indices):
        return [*before, Out(0)]
    by_frequency = bool(argument(op, first + 1, "scale_grad_by_freq"))
    return before + _sorted_backward(grad, indices, weights, target, by_frequency=by_frequency, bags=True)


def _sorted_backward(
    grad: TensorMeta, indices: TensorMeta, weights: int, target: Target, *, by_frequency: bool, bags: bool = False
) -> list[Step]:
    """Sorting, then ``embedding_backward_cuda_kernel`` (EmbeddingBackwardKernel.cu)."""
    item = itemsize(indices.dtype)
    count = numel(indices)
    whole = count * item
    scratch = cub.radix_sort(count, item, item, cub.bits_of(weights), target)
    steps: list[Step] = [
        Take("sorted", whole), Take("original", whole), Take("range", whole),
        launch_scratch("sort", scratch), Drop("sort"), Drop("range"),
    ]  # fmt: skip
    if by_frequency:
        steps.append(Take("counts", whole))
        for name in ("counts up", "counts down"):
            steps += [launch_scratch(name, cub.scan_by_key(count, item, target)), Drop(name)]
    few = not bags and count // _ROWS_PER_THREAD > 3 * weights and weights < 4 * target.sm_count
    return steps + _segments(grad, indices, weights, target, few=few)


def _segments(grad: TensorMeta, indices: TensorMeta, weights: int, target: Target, *, few: bool) -> list[Step]:
    """``embedding_backward_cuda_kernel``: few rows with many indices each are added to atomically.

    The bounds of that path were found by bisection on the phantom device (sm_75 to sm_120).
    """
    item, count, width = itemsize(indices.dtype), numel(indices), grad.shape[-1]
    most = min(count, weights)
    partial = count // _ROWS_PER_THREAD + most
    steps: list[Step] = [
        Out(0), Take("segment offsets", count * item), Take("segments", 8), Take("unique keys", count * item),
        launch_scratch("unique", cub.unique_by_key(count, item, target)), Drop("unique"), Drop("unique keys"),
        Take("partials", most * item), Take("partial offsets", most * item),
        launch_scratch("sum", cub.scan(most, item)), Drop("sum"), Take("partial count", 8),
        launch_scratch("partial segments", partial * item),
    ]  # fmt: skip
    if few:
        steps.append(launch_scratch("segment of partial", partial * item))
        if grad.dtype in ("float16", "bfloat16"):
            steps.append(Take("float gradient", weights * width * 4))
        return steps
    return [*steps, launch_scratch("partial sums", partial * width * max(4, itemsize(grad.dtype)))]


def _bag(op: Op, target: Target) -> list[Step] | None:
    """``_embedding_bag_cuda`` (EmbeddingBag.cu): which bag an index is in, for every mode but the maximum's."""
    indices = tensor(op, 1)
    if indices is None:
        return None
    if argument(op, 4, "mode") == _MAX_MODE:
        return [Out(2), Size(1, nbytes(indices)), Out(1), Out(0), Out(3)]
    return [Out(2), Size(1, nbytes(indices)), Out(1), Size(3, 0), Out(0)]


EMBEDDING: dict[str, Rule] = {
    "embedding_dense_backward.default": _dense_backward,
    "_embedding_bag_backward.default": _bag_backward,
    "_embedding_bag_dense_backward.default": _bag_backward,
    "_embedding_bag.default": _bag,
    "_embedding_bag_forward_only.default": _bag,
}
