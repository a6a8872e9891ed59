"""Operators that reduce: which kernel each one launches, and the copies it makes before.

Template arguments as in the kernels of torch 2.14 (read from the mangled names of the kernels that
the phantom device is asked to launch). A reduction whose kernel does not read the input's type
casts the input first (``make_reduction`` in aten/src/ATen/native/ReduceOpsUtils.h), and holds the
copy until it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fxmem.kernels.iterator import reduction, result_strides
from fxmem.kernels.reduce import Kernel, scratch
from fxmem.kernels.steps import (
    Drop,
    Out,
    Rule,
    Step,
    Take,
    Target,
    argument,
    contiguous,
    itemsize,
    nbytes,
    numel,
    suggests_channels_last,
    tensor,
)  # fmt: skip
from fxmem.tape import Op, TensorMeta

_HALVES = ("float16", "bfloat16")
_INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64")

KernelOf = Callable[[str, str], Kernel]
"""From ``scalar_t`` and ``out_scalar_t``."""


def accumulator(dtype: str) -> str:
    """``at::opmath_type``."""
    return "float32" if dtype in _HALVES else dtype


def _in_place(scalar: str, out: str) -> bool:
    return not (scalar in _HALVES and out == scalar)


def summing(scalar: str, out: str) -> Kernel:
    """``sum_functor`` (ReduceSumProdKernel.cu) and ``mean_kernel_impl`` (ReduceMomentKernel.cu)."""
    return Kernel(
        scalar=scalar, accumulator=itemsize(accumulator(scalar)), vector=8 if scalar in _HALVES else 4,
        in_place=_in_place(scalar, out),
    )  # fmt: skip


def _opmath(scalar: str, out: str) -> Kernel:
    """``prod_functor``, ``nansum_functor`` (ReduceSumProdKernel.cu), ``norm_kernel_cuda_impl``."""
    return Kernel(scalar=scalar, accumulator=itemsize(accumulator(scalar)), in_place=_in_place(scalar, out))


def _extremum(scalar: str, out: str) -> Kernel:
    """``max_values_kernel_cuda_impl`` (ReduceMaxValuesKernel.cu) and its twin for the minimum."""
    return Kernel(scalar=scalar, accumulator=itemsize(scalar), in_place=_in_place(scalar, out))


def _with_index(scalar: str, out: str) -> Kernel:
    """``MaxOps``, ``ArgMaxOps`` (ReduceMaxValuesKernel.cu, ReduceArgMaxKernel.cu): a value and an int64, padded."""
    return Kernel(scalar=scalar, accumulator=16, in_place=False)


def _both_extrema(scalar: str, out: str) -> Kernel:
    """``MinMaxOps`` (ReduceAMinMaxKernel.cu): a pair of values."""
    return Kernel(scalar=scalar, accumulator=2 * itemsize(scalar), in_place=False)


def _truth(scalar: str, out: str) -> Kernel:
    """``and_kernel_cuda`` and ``or_kernel_cuda`` (ReduceLogicKernel.cu): partial results are bools."""
    return Kernel(scalar=scalar, accumulator=1)


def welford(scalar: str, out: str) -> Kernel:
    """``std_var_kernel_impl`` (ReduceMomentKernel.cu): ``WelfordData`` has two means, an int32 and a count."""
    return Kernel(scalar=scalar, accumulator=32 if scalar == "float64" else 16, vector=2, in_place=False)


def reduce_steps(
    source: TensorMeta, results: Sequence[TensorMeta], dims: Sequence[int], kernel_of: KernelOf, target: Target,
    *, keepdim: bool = False, read_as: str = "",
) -> list[Step]:  # fmt: skip
    """``make_reduction`` (ReduceOpsUtils.h) and ``gpu_reduce_kernel`` (Reduce.cuh); results exist already.

    Args:
        source: What is reduced.
        results: One or two results.
        dims: Reduced dimensions, negative from the end; none means all.
        kernel_of: The kernel.
        target: The GPU.
        keepdim: Whether the results keep the reduced dimensions.
        read_as: ``in_dtype``, where it is not the source's: the source is cast to it.
    """
    if not numel(source):
        return []
    wrapped = {d % len(source.shape) for d in dims} if source.shape else set()
    cast: list[Step] = []
    if read_as and read_as != source.dtype:
        source = converted(source, read_as)
        cast = [Take("cast", nbytes(source))]
    operands = reduction(source, results, wrapped, keepdim=keepdim)
    steps = cast + scratch(operands, kernel_of(source.dtype, results[0].dtype), target)
    return [*steps, Drop("cast")] if cast else steps


def read_dtype(source: TensorMeta, result: TensorMeta) -> str:
    """``in_dtype`` of ``make_reduction``: the result's type, except that halves are summed into floats directly."""
    return source.dtype if source.dtype in _HALVES and result.dtype == "float32" else result.dtype


def converted(source: TensorMeta, dtype: str) -> TensorMeta:
    """``to(dtype)`` (``_to_copy`` in aten/src/ATen/native/TensorConversions.cpp): a dense tensor keeps its strides."""
    if _dense(source):
        return source._replace(dtype=dtype, offset=0)
    strides = _channels_last(source.shape) if suggests_channels_last(source) else row_major(source.shape)
    return source._replace(dtype=dtype, stride=strides, offset=0)


def _dense(source: TensorMeta) -> bool:
    """``is_non_overlapping_and_dense``."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(source.stride, source.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(shape[d + 1], 1)
    return tuple(strides)


def _channels_last(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a 4-D or 5-D tensor with its channels innermost."""
    batch, channel, *space = row_major((shape[0], *shape[2:], shape[1]))
    return (batch, space[-1], channel, *space[:-1])


def _contiguous_copy(source: TensorMeta) -> tuple[TensorMeta, list[Step]]:
    """``contiguous()``: the tensor to read, and the copy it takes."""
    if contiguous(source):
        return source, []
    return source._replace(stride=row_major(source.shape), offset=0), [Take("contiguous", nbytes(source))]


def dims_of(value: object) -> tuple[int, ...]:
    """A dimension argument (nothing, one, or several) as a tuple; empty means all."""
    if value is None:
        return ()
    if isinstance(value, int):
        return (value,)
    assert isinstance(value, Sequence)
    return tuple(int(d) for d in value)


def device_tensor(op: Op, position: int) -> TensorMeta | None:
    """The tensor passed as argument ``position``, if it is device memory and the call has results."""
    value = tensor(op, position)
    return value if value is not None and value.storage >= 0 and op.outputs else None


def _rule(kernel_of: KernelOf, *, at: tuple[int, int] | None = None, cast: bool = True) -> Rule:
    """A rule for ``op(self, ...) -> result``; ``at``: positions of the arguments ``dim`` and ``keepdim``."""

    def steps(op: Op, target: Target) -> list[Step] | None:
        source = device_tensor(op, 0)
        if source is None:
            return None
        result = op.outputs[0]
        dims: tuple[int, ...] = ()
        keepdim = False
        if at is not None:
            dims = dims_of(argument(op, at[0], "dim"))
            keepdim = bool(argument(op, at[1], "keepdim", default=False))
        read_as = read_dtype(source, result) if cast else ""
        outs: list[Step] = [Out(0)]
        return outs + reduce_steps(source, (result,), dims, kernel_of, target, keepdim=keepdim, read_as=read_as)

    return steps


def _vector_norm(op: Op, target: Target) -> list[Step] | None:
    """``linalg_vector_norm_out`` (aten/src/ATen/native/LinearAlgebra.cpp): no reduction over a single element."""
    source = device_tensor(op, 0)
    if source is None:
        return None
    dims = dims_of(argument(op, 2, "dim")) or range(len(source.shape))
    if all(source.shape[d] == 1 for d in dims):
        cast = source.dtype != op.outputs[0].dtype
        return [Out(0), Take("cast", nbytes(op.outputs[0])), Drop("cast")] if cast else None
    return list(_rule(_opmath, at=(2, 3))(op, target) or ())


def _all_extremum(op: Op, target: Target) -> list[Step] | None:
    """``max``, ``min`` (aten/src/ATen/native/ReduceAllOps.cpp): of all elements, read in order."""
    source = device_tensor(op, 0)
    if source is None:
        return None
    source, copy = _contiguous_copy(source)
    outs: list[Step] = [Out(0), *copy]
    return outs + reduce_steps(source, op.outputs, (), _extremum, target)


def _two_results(kernel_of: KernelOf, dim: int = 1, keepdim: int = 2) -> Rule:
    """``max.dim`` (TensorCompare.cpp) and ``var_mean`` (ReduceOps.cpp): two results of one kernel."""

    def steps(op: Op, target: Target) -> list[Step] | None:
        source = device_tensor(op, 0)
        if source is None or len(op.outputs) < 2:
            return None
        outs: list[Step] = [Out(0), Out(1)]
        dims = dims_of(argument(op, dim, "dim"))
        keep = bool(argument(op, keepdim, "keepdim", default=False))
        return outs + reduce_steps(source, op.outputs[:2], dims, kernel_of, target, keepdim=keep)

    return steps


def _argmax(op: Op, target: Target) -> list[Step] | None:
    """``argmax_argmin_impl`` (ReduceOps.cpp): flattens without a dimension; trivial along a dimension of size 1."""
    source = device_tensor(op, 0)
    if source is None:
        return None
    outs: list[Step] = [Out(0)]
    dim = argument(op, 1, "dim")
    if dim is None:
        source, copy = _contiguous_copy(source)
        return outs + copy + reduce_steps(source, op.outputs, (), _with_index, target)
    assert isinstance(dim, int)
    if not source.shape or source.shape[dim] == 1:
        return outs
    keepdim = bool(argument(op, 2, "keepdim", default=False))
    return outs + reduce_steps(source, op.outputs, (dim,), _with_index, target, keepdim=keepdim)


def _aminmax(op: Op, target: Target) -> list[Step] | None:
    """``aminmax`` (TensorCompare.cpp); over all elements it reads them in order."""
    source = device_tensor(op, 0)
    if source is None or len(op.outputs) < 2:
        return None
    dims, keepdim = dims_of(argument(op, 1, "dim")), bool(argument(op, 2, "keepdim", default=False))
    outs: list[Step] = [Out(0), Out(1)]
    if not dims:
        source, copy = _contiguous_copy(source)
        outs += copy
    return outs + reduce_steps(source, op.outputs[:2], dims, _both_extrema, target, keepdim=keepdim)


def _logsumexp(op: Op, target: Target) -> list[Step] | None:
    """``logsumexp_out_impl`` (ReduceOps.cpp): maxima, their finiteness, then the sum of shifted exponentials."""
    source = device_tensor(op, 0)
    if source is None or not numel(source):
        return None
    result = op.outputs[0]
    dims = dims_of(argument(op, 1, "dim"))
    reduced = {d % len(source.shape) for d in dims or range(len(source.shape))} if source.shape else set()
    kept = tuple(1 if d in reduced else n for d, n in enumerate(source.shape))
    maxima = result._replace(shape=kept, stride=row_major(kept), dtype=source.dtype, offset=0)
    broadcast = [0 if k != n else s for k, n, s in zip(kept, source.shape, maxima.stride, strict=True)]
    shifted = source._replace(stride=result_strides(source.shape, [source.stride, broadcast]), offset=0)
    keepdim = bool(argument(op, 2, "keepdim", default=False))
    return [
        Take("maxima", nbytes(maxima)),
        *reduce_steps(source, (maxima,), dims, _extremum, target, keepdim=True),
        Take("absolute", nbytes(maxima)), Take("infinite", numel(maxima)), Drop("infinite"), Drop("absolute"),
        Take("shifted", nbytes(shifted)), Out(0),
        *reduce_steps(shifted, (result,), dims, summing, target, keepdim=keepdim),
        Drop("shifted"), Drop("maxima"),
    ]  # fmt: skip


def _count_nonzero(op: Op, target: Target) -> list[Step] | None:
    """``count_nonzero_cuda`` (TensorAdvancedIndexing.cpp): ``(self != 0).sum(dim)``; a bool is summed as it is."""
    source = device_tensor(op, 0)
    if source is None:
        return None
    dims = dims_of(argument(op, 1, "dim"))
    compare = source.dtype != "bool"
    if compare:
        source = source._replace(dtype="bool", stride=result_strides(source.shape, [source.stride]), offset=0)
    total = reduce_steps(source, op.outputs, dims, summing, target, read_as="int64")
    return [Take("nonzero", numel(source)), Out(0), *total, Drop("nonzero")] if compare else [Out(0), *total]


REDUCTIONS: dict[str, Rule] = {
    "sum.default": _rule(summing),
    "mean.default": _rule(summing),
    "sum.dim_IntList": _rule(summing, at=(1, 2)),
    "mean.dim": _rule(summing, at=(1, 2)),
    "nansum.default": _rule(_opmath, at=(1, 2)),
    "prod.default": _rule(_opmath),
    "prod.dim_int": _rule(_opmath, at=(1, 2)),
    "linalg_vector_norm.default": _vector_norm,
    "max.default": _all_extremum,
    "min.default": _all_extremum,
    "amax.default": _rule(_extremum, at=(1, 2), cast=False),
    "amin.default": _rule(_extremum, at=(1, 2), cast=False),
    "max.dim": _two_results(_with_index),
    "min.dim": _two_results(_with_index),
    "argmax.default": _argmax,
    "argmin.default": _argmax,
    "aminmax.default": _aminmax,
    "any.default": _rule(_truth, cast=False),
    "all.default": _rule(_truth, cast=False),
    **{f"{name}.{kind}": _rule(_truth, at=(1, 2), cast=False) for name in ("any", "all") for kind in ("dim", "dims")},
    "var.correction": _rule(welford, at=(1, 3), cast=False),
    "std.correction": _rule(welford, at=(1, 3), cast=False),
    "var_mean.correction": _two_results(welford, 1, 3),
    "std_mean.correction": _two_results(welford, 1, 3),
    "logsumexp.default": _logsumexp,
    "count_nonzero.default": _count_nonzero,
    "count_nonzero.dim_IntList": _count_nonzero,
}
