"""Operators on lists of tensors: what the multi-tensor kernels of CUDA allocate beside their results.

Most of them take nothing more than their results, one after the other, on the fast path and on the slow
one alike. The reductions keep a row of partial results per tensor
(aten/src/ATen/native/cuda/ForeachReduceOp.cu).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fxmem.kernels.reductions import REDUCTIONS, accumulator
from fxmem.kernels.steps import Drop, Out, Rule, Step, Take, Target, argument, itemsize, launch_scratch, numel
from fxmem.tape import Op, Ref, TensorMeta

_CHUNK = 65536
"""``kChunkSize`` (aten/src/ATen/native/cuda/MultiTensorApply.cuh): elements that one block works on."""

_FLOATING = ("float64", "float32", "float16", "bfloat16")
_FAST_ORDERS = (1.0, 2.0, math.inf)


def _dense(meta: TensorMeta) -> bool:
    """``is_non_overlapping_and_dense``."""
    expected = 1
    for stride, size in sorted(zip(meta.stride, meta.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _fast(tensors: Sequence[TensorMeta]) -> bool:
    """``can_use_fast_route`` for one list: one dtype, no gaps."""
    return all(t.dtype == tensors[0].dtype and _dense(t) for t in tensors)


def _partial_results(tensors: Sequence[TensorMeta], dtype: str) -> Take:
    """One value per chunk of the largest tensor, for each tensor."""
    chunks = max(-(-numel(t) // _CHUNK) for t in tensors)
    return launch_scratch("partial results", len(tensors) * chunks * itemsize(dtype))


def _results(op: Op, tensors: Sequence[TensorMeta]) -> list[Step]:
    """Results of the tensors that have elements come first; those of empty ones are made at the end."""
    full = [i for i, t in enumerate(tensors) if numel(t)]
    empty = [i for i, t in enumerate(tensors) if not numel(t)]
    return [Out(i) for i in (*full, *empty)]


def _tensors(op: Op) -> tuple[TensorMeta, ...]:
    refs = op.args[0]
    assert isinstance(refs, tuple)
    return tuple(op.inputs[r.at] for r in refs if isinstance(r, Ref))


def _norm(op: Op, target: Target) -> list[Step] | None:
    """``foreach_tensor_norm_cuda``; ``foreach_tensor_norm_slow`` where the kernel cannot be used."""
    tensors = _tensors(op)
    order = argument(op, 1, "ord", 2)
    if not tensors or not isinstance(order, (int, float)):
        return None
    if not _fast(tensors) or tensors[0].dtype not in _FLOATING or float(order) not in _FAST_ORDERS:
        return _one_by_one(op, tensors, order, target)
    result = str(argument(op, 2, "dtype") or tensors[0].dtype)
    return [_partial_results(tensors, accumulator(result)), *_results(op, tensors), Drop("partial results")]


def _one_by_one(op: Op, tensors: Sequence[TensorMeta], order: float, target: Target) -> list[Step] | None:
    """``linalg_vector_norm`` of each tensor."""
    rule = REDUCTIONS.get("linalg_vector_norm.default")
    if rule is None:
        return None
    dtype = argument(op, 2, "dtype")
    steps: list[Step] = []
    for i, tensor in enumerate(tensors):
        one = replace(
            op, name="linalg_vector_norm.default", inputs=(tensor,), outputs=(op.outputs[i],),
            args=(Ref(0), order), kwargs=(("dtype", dtype),) if dtype else (),
        )  # fmt: skip
        found = rule(one, target) or [Out(0)]
        steps += [Out(i) if isinstance(step, Out) else step for step in found]
    return steps


def _max(op: Op, target: Target) -> list[Step] | None:
    """``foreach_tensor_max_cuda``: partial results are of the tensors' own type."""
    tensors = _tensors(op)
    if not tensors or not _fast(tensors):
        return None
    return [_partial_results(tensors, tensors[0].dtype), *_results(op, tensors), Drop("partial results")]


def _scalar_power(op: Op, target: Target) -> list[Step]:
    """``pow.Scalar`` (aten/src/ATen/native/Pow.cpp): the base becomes a device tensor of its own, 1 does not."""
    base = op.args[0]
    if isinstance(base, bool) or not isinstance(base, (int, float)) or base == 1:
        return [Out(0)]
    return [Out(0), Take("base", itemsize("float64")), Drop("base")]


FOREACH: dict[str, Rule] = {
    "_foreach_norm.Scalar": _norm,
    "_foreach_max.default": _max,
    "pow.Scalar": _scalar_power,
}
