"""Softmax, dropout and pointwise operators that take temporaries or allocate their results in another order."""

from __future__ import annotations

from fxmem.kernels.copies import copy, dense, elementwise
from fxmem.kernels.gemm import cublas_workspace
from fxmem.kernels.reductions import reduce_steps, summing
from fxmem.kernels.steps import Drop, Out, Rule, Size, Step, Take, Target, argument, itemsize, nbytes, numel, tensor
from fxmem.tape import Op, TensorMeta


def _softmax(op: Op, target: Target) -> list[Step]:
    """``host_softmax`` in aten/src/ATen/native/cuda/SoftMax.cu reads a dense input."""
    return [Out(0), *copy("input", tensor(op, 0))]


def _softmax_backward(op: Op, target: Target) -> list[Step]:
    """``softmax_backward_cuda_out`` in aten/src/ATen/native/cuda/SoftMax.cu: gradient times output first."""
    grad, output = tensor(op, 0), tensor(op, 1)
    if grad is None or output is None:
        return [Out(0)]
    product = elementwise(grad, output)
    return [Out(0), Take("product", nbytes(product)), *copy("grad", product), *copy("output", output)]


def _log_softmax_backward(op: Op, target: Target) -> list[Step]:
    """``host_softmax_backward`` in aten/src/ATen/native/cuda/SoftMax.cu."""
    return [Out(0), *copy("grad", tensor(op, 0)), *copy("output", tensor(op, 1))]


def _masked_softmax_backward(op: Op, target: Target) -> list[Step]:
    """``masked_softmax_backward_cuda`` in aten/src/ATen/native/cuda/SoftMax.cu: gradient times output first."""
    grad = tensor(op, 0)
    return [] if grad is None else [Take("product", nbytes(grad)), Out(0)]


def _log_sigmoid(op: Op, target: Target) -> list[Step]:
    """``log_sigmoid_forward_cuda`` in aten/src/ATen/native/cuda/Activation.cpp: the buffer stays empty."""
    return [Out(0), Size(1, 0)]


def _no_memory(op: Op, target: Target) -> list[Step]:
    """``_efficientzerotensor_cuda`` in aten/src/ATen/native/cuda/TensorFactories.cu: a ZeroTensor has no storage."""
    return [Size(0, 0)]


def _native_dropout(op: Op, target: Target) -> list[Step]:
    """``native_dropout_cuda`` in aten/src/ATen/native/cuda/Dropout.cu: the mask comes first, except for p = 1."""
    train = argument(op, 2, "train")
    if argument(op, 1, "p") == 1 and train is not False:
        return [Out(0), Out(1)]
    return [Out(1), Out(0)]


def _isinf(op: Op, target: Target) -> list[Step]:
    """``isinf`` in aten/src/ATen/native/TensorCompare.cpp: ``self.abs() == inf``."""
    x = tensor(op, 0)
    if x is None or x.dtype in ("bool", "int64", "int32", "int16", "int8", "uint8"):
        return [Out(0)]
    return [Take("abs", numel(x) * itemsize(x.dtype)), Out(0)]


def _euclidean(op: Op, target: Target) -> list[Step]:
    """``_euclidean_dist`` in aten/src/ATen/native/Distance.cpp: squared norms, then one batched product."""
    first, second = tensor(op, 0), tensor(op, 1)
    if first is None or second is None:
        return [Out(0)]
    steps: list[Step] = []
    for name, x in (("1", first), ("2", second)):
        norm = dense(x._replace(shape=(*x.shape[:-1], 1)))
        steps += [
            Take(f"squares {name}", nbytes(x)), Take(f"norm {name}", nbytes(norm)),
            *reduce_steps(elementwise(x), (norm,), (-1,), summing, target, keepdim=True),
            Drop(f"squares {name}"), Take(f"ones {name}", nbytes(norm)),
        ]  # fmt: skip
    steps += [
        Take("scaled", nbytes(first)), Take("left", _widened(first)),
        Drop("scaled"), Drop("norm 1"), Drop("ones 1"),
        Take("right", _widened(second)), Drop("norm 2"), Drop("ones 2"),
    ]  # fmt: skip
    return [*steps, Out(0), cublas_workspace(target)]


def _widened(x: TensorMeta) -> int:
    """Bytes with two more columns."""
    return nbytes(x._replace(shape=(*x.shape[:-1], x.shape[-1] + 2)))


def _cdist(op: Op, target: Target) -> list[Step] | None:
    """``cdist_impl`` in aten/src/ATen/native/Distance.cpp: a product for many points of the Euclidean distance."""
    first, second = tensor(op, 0), tensor(op, 1)
    if first is None or second is None or argument(op, 2, "p") != 2.0:
        return None
    mode = argument(op, 3, "compute_mode") or 0
    many = first.shape[-2] > 25 or second.shape[-2] > 25
    return _euclidean(op, target) if mode == 1 or (mode == 0 and many) else None


def _cdist_backward(op: Op, target: Target) -> list[Step] | None:
    """``_cdist_backward`` in aten/src/ATen/native/Distance.cpp: one term per pair and column, summed after."""
    grad, first = tensor(op, 0), tensor(op, 1)
    if grad is None or first is None:
        return None
    return [Out(0), Take("terms", nbytes(grad) * first.shape[-1])]


def _pdist_backward(op: Op, target: Target) -> list[Step] | None:
    """``pdist_backward_kernel_impl`` in aten/src/ATen/native/cuda/DistanceKernel.cu: one term per pair and column."""
    points = tensor(op, 1)
    if points is None:
        return None
    return [Out(0), Take("terms", nbytes(points) * (points.shape[0] - 1))]


def _affine_grid(op: Op, target: Target) -> list[Step] | None:
    """``affine_grid_generator`` in aten/src/ATen/native/AffineGridGenerator.cpp: a base grid, filled line by line."""
    theta, size = tensor(op, 0), argument(op, 1, "size")
    if theta is None or not isinstance(size, tuple):
        return None
    item = itemsize(theta.dtype)
    points = item * size[0] * (len(size) - 1)
    for n in size[2:]:
        points *= n
    steps: list[Step] = [Take("base", points)]
    for n in reversed(size[2:]):
        lines = 1 if argument(op, 2, "align_corners") or n <= 1 else 3
        names = [f"line {n} {i}" for i in range(lines)]
        steps += [Take(name, n * item) for name in names] + [Drop(name) for name in names]
    return [*steps, Out(0), cublas_workspace(target)]


POINTWISE: dict[str, Rule] = {
    "_softmax.default": _softmax,
    "_log_softmax.default": _softmax,
    "_softmax_backward_data.default": _softmax_backward,
    "_log_softmax_backward_data.default": _log_softmax_backward,
    "_masked_softmax_backward.default": _masked_softmax_backward,
    "log_sigmoid_forward.default": _log_sigmoid,
    "_efficientzerotensor.default": _no_memory,
    "native_dropout.default": _native_dropout,
    "isinf.default": _isinf,
    "_euclidean_dist.default": _euclidean,
    "_cdist_forward.default": _cdist,
    "_cdist_backward.default": _cdist_backward,
    "_pdist_backward.default": _pdist_backward,
    "affine_grid_generator.default": _affine_grid,
}
