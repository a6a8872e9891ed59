"""Advanced indexing, scatter and friends: index tensors made uniform, accumulation by sorting.

Mirrors aten/src/ATen/native/cuda/{Indexing,IndexKernel,Nonzero}.cu and
aten/src/ATen/native/{TensorAdvancedIndexing,TensorTransformations}.cpp of torch 2.14.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fxmem.kernels import cub
from fxmem.kernels.copies import copies, copy, dense
from fxmem.kernels.reductions import _both_extrema as both_extrema
from fxmem.kernels.reductions import _with_index as with_index
from fxmem.kernels.reductions import reduce_steps, summing
from fxmem.kernels.sorting import topk_steps
from fxmem.kernels.steps import (
    Drop,
    Out,
    Rule,
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
from fxmem.tape import Op, Phase, Ref, TensorMeta


def _indices(op: Op) -> list[TensorMeta | None]:
    """The list argument of index tensors, ``None`` where a dimension is taken whole."""
    given = op.args[1] if len(op.args) > 1 else ()
    if not isinstance(given, Sequence):
        return []
    return [op.inputs[item.at] if isinstance(item, Ref) else None for item in given]


def _prepared(op: Op, target: Target) -> tuple[list[Step], list[TensorMeta | None]]:
    """``make_info``: masks become positions, int32 becomes int64, all are broadcast; with what that takes."""
    steps: list[Step] = []
    found: list[TensorMeta | None] = []
    for at, index in enumerate(_indices(op)):
        if index is None:
            found.append(None)
        elif index.dtype in ("bool", "uint8"):
            steps += nonzero_steps(f"mask {at}", index, target)
            found += [index._replace(shape=(0,), stride=(1,), dtype="int64") for _ in index.shape]
        else:
            if index.dtype == "int32":
                index = dense(index)._replace(dtype="int64")
                steps.append(Take(f"int64 {at}", nbytes(index)))
            found.append(index)
    return steps, _broadcast(found)


def _broadcast(indices: list[TensorMeta | None]) -> list[TensorMeta | None]:
    """``expand_outplace``."""
    present = [index for index in indices if index is not None]
    rank = max((len(index.shape) for index in present), default=0)
    shape = [1] * rank
    for index in present:
        for d, n in enumerate(index.shape[::-1], 1):
            shape[-d] = n if n != 1 else shape[-d]
    return [None if index is None else _expanded(index, tuple(shape)) for index in indices]


def _expanded(index: TensorMeta, shape: tuple[int, ...]) -> TensorMeta:
    """``expand``: stride 0 where a dimension is repeated."""
    missing = len(shape) - len(index.shape)
    sizes, strides = (1,) * missing + index.shape, (0,) * missing + index.stride
    stride = tuple(0 if n == 1 and m != 1 else s for n, m, s in zip(sizes, shape, strides, strict=True))
    return index._replace(shape=shape, stride=stride)


def _uniform(indices: Sequence[TensorMeta | None]) -> list[Step]:
    """``AdvancedIndex``: all index tensors get the same strides, by copies if need be."""
    present = [index for index in indices if index is not None]
    if len({index.stride for index in present}) <= 1:
        return []
    return [step for at, index in enumerate(present) for step in copy(f"uniform {at}", index)]


def _index(op: Op, target: Target) -> list[Step] | None:
    """``index`` (TensorAdvancedIndexing.cpp)."""
    if tensor(op, 0) is None:
        return None
    steps, indices = _prepared(op, target)
    return [*steps, *_uniform(indices), Out(0)]


def _index_put(op: Op, target: Target) -> list[Step] | None:
    """``_index_put_impl_`` (TensorAdvancedIndexing.cpp); out of place it works on a clone, made first."""
    x, value = tensor(op, 0), tensor(op, 2)
    if x is None or value is None:
        return None
    before: list[Step] = [] if op.name.startswith(("index_put_", "_index_put_impl_")) else [Out(0)]
    accumulate = bool(argument(op, 3, "accumulate", default=False))
    if not accumulate and _fills_mask(op, value):
        return before
    steps, indices = _prepared(op, target)
    if not accumulate:
        return [*before, *steps, *_uniform(indices)]
    if before:
        x = dense(x)
    return before + _put_sorted(x, indices, value, steps, target, checked=not _unsafe(op))


def _fills_mask(op: Op, value: TensorMeta) -> bool:
    """``canDispatchToMaskedFill`` (TensorAdvancedIndexing.cpp): one mask, and one value from the host."""
    indices = op.args[1]
    assert isinstance(indices, tuple)
    given = [op.inputs[i.at] for i in indices if isinstance(i, Ref)]
    return value.storage < 0 and numel(value) == 1 and [i.dtype in ("bool", "uint8") for i in given] == [True]


def _unsafe(op: Op) -> bool:
    """Whether indices were checked before: in ``index_backward`` (FunctionsManual.cpp)."""
    by_argument = bool(argument(op, 4, "unsafe", default=False))
    return by_argument or op.name.startswith("_unsafe") or op.phase is Phase.BACKWARD


def _put_sorted(
    x: TensorMeta,
    indices: list[TensorMeta | None],
    value: TensorMeta,
    prepared: list[Step],
    target: Target,
    *,
    checked: bool,
) -> list[Step]:
    """``index_put_with_sort_kernel`` (Indexing.cu)."""
    whole = [*indices, *[None] * (len(x.shape) - len(indices))]
    present = [at for at, index in enumerate(whole) if index is not None]
    first = whole[present[0]]
    assert first is not None
    count = numel(first)
    steps = copy("self", x)
    if copies(x):
        x = dense(x)
    steps += prepared + _linear_index([whole[at] for at in present], target, checked=checked)
    steps += [Drop(step.key) for step in prepared if isinstance(step, Take)]
    adjacent = present == list(range(present[0], present[-1] + 1))
    around = [n for at, n in enumerate(x.shape) if at not in present]
    wanted = count * math.prod(around)
    if numel(value) < wanted:
        steps.append(Take("value", wanted * itemsize(value.dtype)))
    else:
        steps += copy("value", value)
    if not adjacent:
        steps.append(Take("permuted", nbytes(x)))
    after = math.prod(n for at, n in enumerate(x.shape) if at > present[-1]) if adjacent else math.prod(around)
    largest = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride, strict=True))
    scratch = cub.radix_sort(count, 8, 8, cub.bits_of(largest // max(after, 1)), target)
    return [
        *steps, Take("sorted", count * 8), Take("original", count * 8), Take("range", count * 8),
        launch_scratch("sort", scratch),
    ]  # fmt: skip


def _linear_index(indices: Sequence[TensorMeta | None], target: Target, *, checked: bool) -> list[Step]:
    """``computeLinearIndex`` (Indexing.cu): each index is checked, wrapped, scaled and added."""
    steps: list[Step] = []
    for at, index in enumerate(indices):
        assert index is not None
        nbytes_ = numel(index) * 8
        if checked:
            steps += [
                *extrema(index, target), Take("not small", 1), Drop("not small"), Take("not large", 1),
                Drop("least"), Drop("most"), Drop("not large"),
            ]  # fmt: skip
        steps += [
            Take("wrapped", nbytes_), Take("linear" if at == 0 else "scaled", nbytes_), Drop("wrapped"),
        ]  # fmt: skip
        if at:
            steps.append(Drop("scaled"))
    return steps


def extrema(x: TensorMeta, target: Target) -> list[Step]:
    """``aminmax`` of all elements (TensorCompare.cpp), as ``least`` and ``most``."""
    scalar = x._replace(shape=(), stride=(), offset=0)
    copied = copy("flat", x)
    source = dense(x) if copied else x
    return [
        Take("least", itemsize(x.dtype)), Take("most", itemsize(x.dtype)), *copied,
        *reduce_steps(source, (scalar, scalar), (), both_extrema, target), Drop("flat"),
    ]  # fmt: skip


def nonzero_steps(key: str, x: TensorMeta, target: Target) -> list[Step]:
    """``nonzero_cuda_out_impl`` (Nonzero.cu) up to its result: elements are counted first."""
    return [
        *copy(f"{key} input", x), Take(f"{key} count", 4),
        launch_scratch(f"{key} reduce", cub.reduce(numel(x), 4, target)), Drop(f"{key} reduce"),
        launch_scratch(f"{key} select", cub.select_flagged(numel(x), target)),
    ]  # fmt: skip


def _nonzero(op: Op, target: Target) -> list[Step] | None:
    """``nonzero_cuda`` (Nonzero.cu)."""
    x = tensor(op, 0)
    if x is None or not numel(x):
        return None
    steps = nonzero_steps("nonzero", x, target)
    return [*steps[:-1], Out(0), steps[-1]]


def _masked_scatter(op: Op, target: Target) -> list[Step] | None:
    """``masked_scatter__cuda`` and ``launch_masked_scatter_kernel`` (IndexKernel.c*): where each True's source is."""
    x, mask = tensor(op, 0), tensor(op, 1)
    if x is None or mask is None:
        return None
    whole = _expanded(mask, x.shape)
    before: list[Step] = [] if op.name.startswith("masked_scatter_.") else [Out(0)]
    return [
        *before, Take("positions", numel(x) * 8), *copy("mask", whole),
        launch_scratch("scan", cub.scan(numel(x), 8)), *copy("source", tensor(op, 2)),
    ]  # fmt: skip


def _unfold_backward(op: Op, target: Target) -> list[Step] | None:
    """``unfold_backward_cuda_kernel`` (UnfoldBackwardKernel.cu): positions along the unfolded dimension."""
    sizes, dim = argument(op, 1, "input_sizes"), argument(op, 2, "dim")
    if not isinstance(sizes, Sequence) or not isinstance(dim, int):
        return None
    return [Out(0), Take("positions", int(sizes[dim]) * 8)]


def _roll(op: Op, target: Target) -> list[Step] | None:
    """``roll_cuda`` (TensorTransformations.cu); several dimensions are rolled one after the other."""
    x, dims = tensor(op, 0), argument(op, 2, "dims", ())
    if x is None or not isinstance(dims, Sequence) or not numel(x):
        return None
    first = copy("dense", x)
    steps = list(first)
    for at in range(len(dims) - 1):
        steps += [Take(f"rolled {at}", nbytes(x)), *([Drop("dense")] if first and at == 0 else [])]
    return [*steps, Out(0)]


def _bincount(op: Op, target: Target) -> list[Step] | None:
    """``_bincount_cuda`` (SummaryOps.cu): smallest and largest value first."""
    x = tensor(op, 0)
    return None if x is None or not numel(x) else [*extrema(x, target), Out(0)]


def _histc(op: Op, target: Target) -> list[Step] | None:
    """``_histc_cuda`` (SummaryOps.cu): without a range, that of the values."""
    x = tensor(op, 0)
    if x is None or not numel(x) or argument(op, 2, "min", 0) != argument(op, 3, "max", 0):
        return None
    return [Out(0), *extrema(x, target)]


def _searchsorted(op: Op, target: Target) -> list[Step] | None:
    """``searchsorted_pre_check`` (BucketizationUtils.h): dense copies, of the values before the boundaries."""
    return [Out(0), *copy("values", tensor(op, 1)), *copy("boundaries", tensor(op, 0))]


def _multinomial(op: Op, target: Target) -> list[Step] | None:
    """``multinomial_out`` (Distributions.cpp): one draw, or draws without replacement, are a race of variates."""
    x, count = tensor(op, 0), argument(op, 1, "num_samples")
    if x is None or not numel(x) or not op.outputs:
        return None
    if argument(op, 2, "replacement", default=False) and count != 1:
        return _multinomial_replaced(x)
    rows, last = numel(x) // x.shape[-1], len(x.shape) - 1
    sums = dense(x._replace(shape=(*x.shape[:-1], 1)))
    steps = [
        Out(0), *extrema(x, target), Take("finite", 1), Take("positive", 1), Take("valid", 1),
        Drop("positive"), Drop("finite"), Take("sums", nbytes(sums)),
        *reduce_steps(x, (sums,), (last,), summing, target, keepdim=True), Take("zero", rows),
    ]  # fmt: skip
    if last:
        steps += [Take("any", 1), Drop("sums"), Drop("zero")]
    steps += [Drop("sums"), Take("not any", 1), Drop("not any"), Take("race", nbytes(x))]
    race = dense(x)
    if count == 1:
        return steps + reduce_steps(race, op.outputs, (last,), with_index, target, keepdim=True)
    return [*steps, Take("best", numel(op.outputs[0]) * itemsize(x.dtype)), *topk_steps(race, last, target)]


def _multinomial_replaced(x: TensorMeta) -> list[Step]:
    """``multinomial_with_replacement_kernel_impl`` (MultinomialKernel.cu): a distribution and its running sum."""
    steps: list[Step] = [Out(0), Take("input", nbytes(x)), Take("normalized", nbytes(x)), Take("prefix", nbytes(x))]
    if len(x.shape) == 1:
        halves = x.dtype in ("float16", "bfloat16")
        steps.append(launch_scratch("scan", cub.scan(numel(x), itemsize(x.dtype), primitive=not halves)))
    return steps


def _isin(op: Op, target: Target) -> list[Step] | None:
    """``isin_default_kernel_gpu`` (TensorCompare.cpp): every pair compared, where the tests are few."""
    x, tests = tensor(op, 0), tensor(op, 1)
    if x is None or tests is None:
        return None
    if numel(tests) >= 10 * numel(x) ** 0.145:
        return None
    return [Out(0), Take("pairs", numel(x) * numel(tests)), Take("any", numel(x)), Drop("pairs")]


def _repeat_interleave(op: Op, target: Target) -> list[Step] | None:
    """``repeat_interleave_common`` (Repeat.h): a running sum of the repeats."""
    repeats = tensor(op, 0)
    if repeats is None or not numel(repeats):
        return None
    return [*cumulated("sum", repeats, "int64"), Out(0)]


def cumulated(key: str, x: TensorMeta, dtype: str) -> list[Step]:
    """``cumsum`` of a dense vector into memory of its own."""
    item = itemsize(dtype)
    return [
        Take(key, numel(x) * item), *([] if x.dtype == dtype else [Take(f"{key} cast", numel(x) * item)]),
        launch_scratch(f"{key} scan", cub.scan(numel(x), item)), Drop(f"{key} scan"), Drop(f"{key} cast"),
    ]  # fmt: skip


def _scan(op: Op, target: Target) -> list[Step] | None:
    """``scan_dim`` (ScanUtils.cuh): a cast, a dense copy, and for a single row CUB's scan."""
    x = tensor(op, 0)
    if x is None or not op.outputs or not numel(x):
        return None
    result, dim = op.outputs[0], argument(op, 1, "dim")
    steps: list[Step] = [Out(0)]
    if x.dtype != result.dtype:
        steps.append(Take("cast", nbytes(result)))
        x = dense(x)._replace(dtype=result.dtype) if not copies(x) else x._replace(dtype=result.dtype)
    steps += copy("input", x)
    if copies(result):
        steps.append(Take("result", nbytes(result)))
    if isinstance(dim, int) and x.shape and numel(x) == x.shape[dim]:
        halves = result.dtype in ("float16", "bfloat16")
        steps.append(launch_scratch("scan", cub.scan(numel(x), itemsize(result.dtype), primitive=not halves)))
    return steps


INDEX: dict[str, Rule] = {
    "index.Tensor": _index,
    "index_put.default": _index_put,
    "index_put_.default": _index_put,
    "_index_put_impl_.default": _index_put,
    "_unsafe_index_put.default": _index_put,
    "nonzero.default": _nonzero,
    "masked_scatter.default": _masked_scatter,
    "masked_scatter_.default": _masked_scatter,
    "unfold_backward.default": _unfold_backward,
    "roll.default": _roll,
    "bincount.default": _bincount,
    "histc.default": _histc,
    "searchsorted.Tensor": _searchsorted,
    "multinomial.default": _multinomial,
    "isin.Tensor_Tensor": _isin,
    "repeat_interleave.Tensor": _repeat_interleave,
    "cumsum.default": _scan,
    "cumsum_.default": _scan,
    "cumprod.default": _scan,
    "_cumprod.default": _scan,
    "_cumsum.default": _scan,
    "logcumsumexp.default": _scan,
    "_logcumsumexp.default": _scan,
}
