"""Fourier transforms: in how many stages cuFFT runs them, what is copied for it, where results lie.

Mirrors aten/src/ATen/native/cuda/{SpectralOps.cpp,CuFFTPlanCache.h} of torch 2.14. How much workspace a plan
takes is the library's answer, which it gives on a GPU only. One complex copy of the signal is taken here, as the
phantom does (calibration/phantom/README.md); every report says that it is an assumption (:data:`ASSUMED`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fxmem.kernels.copies import elementwise
from fxmem.kernels.steps import Drop, Out, Rule, Step, Take, Target, argument, itemsize, launch_scratch, numel, tensor
from fxmem.tape import Op, TensorMeta

_MAX_DIMS = 3
"""``cufft_max_ndim``: dimensions of one plan."""

Ints = Sequence[int]


@dataclass(slots=True)
class Walk:
    """The allocations of one transform, in order, and the strides of its result.

    ``first`` and ``second`` name the two buffers between which stages go to and fro.
    """

    shape: tuple[int, ...]
    half: bool = False
    """cuFFT's 16-bit transforms read dense signals only."""
    strides: tuple[int, ...] = ()
    steps: list[tuple[str, str, int]] = field(default_factory=list)
    """``take``, ``drop`` or ``plan`` (a workspace), the buffer's name, elements."""
    result: str = "first"

    def take(self, name: str, elements: int) -> None:
        """Note an allocation."""
        self.steps.append(("take", name, elements))

    def drop(self, name: str) -> None:
        """Note a release."""
        self.steps.append(("drop", name, 0))


def real_to_complex(shape: Ints, strides: Ints, dims: Ints, *, onesided: bool, half: bool = False) -> Walk:
    """``_fft_r2c_cufft``."""
    last = dims[-1]
    kept = _with(shape, last, shape[last] // 2 + 1)
    out = kept if onesided else tuple(shape)
    walk = Walk(out, half)
    walk.take("first", math.prod(out))
    if _one_plan(dims):
        walk.strides = _stage(walk, shape, strides, out, dims, "real copy")
        return walk
    now = _stage(walk, shape, strides, kept, [last], "real copy")
    other = "second"
    walk.take(other, math.prod(out))
    left = list(dims[:-1])
    while left:
        walk.result, other = other, walk.result
        left, stage = _next_stage(left, now)
        now = _stage(walk, kept, now, kept, stage)
    if kept[last] != out[last]:  # mirrored into the other buffer
        walk.result, now = other, _dense(out)
    walk.strides = now
    return walk


def complex_to_real(shape: Ints, strides: Ints, dims: Ints, length: int, *, half: bool = False) -> Walk:
    """``_fft_c2r_cufft``: cuFFT may write over its input, so it gets a copy."""
    out = _with(shape, dims[-1], length)
    walk = Walk(out, half, result="real")
    walk.take("real", math.prod(out))
    if _one_plan(dims):
        walk.take("copy", math.prod(shape))
        walk.strides = _stage(walk, shape, _dense(shape), out, dims)
        return walk
    between = complex_to_complex(shape, strides, dims[:-1], half=half)
    walk.steps += between.steps
    if len(dims) - 1 > _MAX_DIMS:  # all but its result go when it returns
        walk.drop("second" if between.result == "first" else "first")
    walk.strides = _stage(walk, shape, between.strides, out, dims[-1:])
    return walk


def complex_to_complex(shape: Ints, strides: Ints, dims: Ints, *, half: bool = False) -> Walk:
    """``_fft_c2c_cufft``."""
    walk = Walk(tuple(shape), half)
    walk.take("first", math.prod(shape))
    now, left, other = tuple(strides), list(dims), ""
    while True:
        left, stage = _next_stage(left, now)
        now = _stage(walk, shape, now, shape, stage)
        if not left:
            walk.strides = now
            return walk
        if not other:
            walk.result, other = "second", "first"
            walk.take("second", math.prod(shape))
        else:
            walk.result, other = other, walk.result


def _next_stage(dims: list[int], strides: Ints) -> tuple[list[int], list[int]]:
    """The dimensions left, and the up to three with the least strides."""
    dims = sorted(dims, key=lambda d: -strides[d])
    return dims[:-_MAX_DIMS], dims[-_MAX_DIMS:]


def _one_plan(dims: Ints) -> bool:
    """``use_optimized_cufft_path``."""
    return len(dims) <= _MAX_DIMS and tuple(dims[:2]) != (0, 1)


def _stage(
    walk: Walk, shape: Ints, strides: Ints, out: Ints, dims: Ints, copy: str = "complex copy"
) -> tuple[int, ...]:  # fmt: skip
    """``_exec_fft``: the strides it gives its output; ``walk`` notes what it copies before, named ``copy``."""
    batch = sorted((d for d in range(len(shape)) if d not in dims), key=lambda d: -strides[d])
    stride = _collapsed([shape[d] for d in batch], [strides[d] for d in batch])
    signal = [max(shape[d], out[d]) for d in dims]
    count = math.prod(shape[d] for d in batch)
    own = [strides[d] for d in dims]
    copies = stride is None or (walk.half and own[-1] != 1) or _must_copy(count, stride, signal, own)
    if copies:
        walk.take(copy, math.prod(shape))
    walk.steps.append(("plan", "cufft", count * math.prod(signal)))
    walk.drop("cufft")
    if copies:
        walk.drop(copy)
    result = [0] * len(shape)
    step = 1
    for d in (*reversed(dims), *reversed(batch)):
        result[d] = step
        step *= out[d]
    return tuple(result)


def _collapsed(shape: Ints, strides: Ints) -> int | None:
    """The stride of all batch dimensions as one; ``None``: no view can have it."""
    kept = [(n, s) for n, s in zip(shape, strides, strict=True) if n != 1]
    if any(kept[i][1] != kept[i + 1][0] * kept[i + 1][1] for i in range(len(kept) - 1)):
        return None
    return kept[-1][1] if kept else 1


def _must_copy(batch: int, stride: int, signal: Ints, strides: Ints) -> bool:
    """``as_cufft_embed``: whether the strides are no part of a larger dense array."""
    last = strides[-1]
    if last <= 0 or (batch != 1 and stride == 0):
        return True
    for size, outer in zip(signal[-2::-1], strides[-2::-1], strict=True):
        if size != 1:
            if outer <= 0 or outer % last:
                return True
            last = outer
    return False


def _dense(shape: Ints) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _with(shape: Ints, dim: int, size: int) -> tuple[int, ...]:
    return tuple(size if i == dim % len(shape) else n for i, n in enumerate(shape))


def walk_of(name: str, x: TensorMeta, op: Op) -> Walk | None:
    """What a call does, ``None`` if its arguments are not those of the operator."""
    dims = argument(op, 1, "dim")
    if not isinstance(dims, tuple) or not dims:
        return None
    half = x.dtype in ("float16", "complex32")
    if name == "_fft_c2c.default":
        return complex_to_complex(x.shape, x.stride, dims, half=half)
    how = argument(op, 3, "onesided" if name == "_fft_r2c.default" else "last_dim_size")
    if name == "_fft_r2c.default":
        return real_to_complex(x.shape, x.stride, dims, onesided=bool(how), half=half)
    return complex_to_real(x.shape, x.stride, dims, how, half=half) if isinstance(how, int) else None


def _transform(op: Op, target: Target) -> list[Step] | None:
    x = tensor(op, 0)
    if x is not None and x.dtype == "bfloat16":
        return _of_bfloat16(op, x, target)
    walk = walk_of(op.name, x, op) if x is not None and op.outputs else None
    if x is None or walk is None:
        return None
    result = itemsize(op.outputs[0].dtype)
    size = {"real": result, "real copy": itemsize(x.dtype)}
    complex_ = max(itemsize(x.dtype), result)
    steps: list[Step] = []
    for what, name, elements in walk.steps:
        if what == "drop":
            steps.append(Drop(name))
        elif what == "plan":
            steps.append(launch_scratch(name, elements * complex_))
        else:
            steps.append(Out(0) if name == walk.result else Take(name, elements * size.get(name, complex_)))
    return steps


def _of_bfloat16(op: Op, x: TensorMeta, target: Target) -> list[Step] | None:
    """Powers of two in one plan from sm_80 on, into a buffer that is then widened; else all of it in float32."""
    dims = argument(op, 1, "dim")
    if not isinstance(dims, tuple) or not op.outputs:
        return None
    if target.sm < 80 or not _one_plan(dims) or any(x.shape[d] & (x.shape[d] - 1) for d in dims):
        wide = _transform(replace(op, inputs=(elementwise(x)._replace(dtype="float32"),)), target)
        return [Take("float32", numel(x) * 4), *wide] if wide is not None else None
    walk = real_to_complex(x.shape, x.stride, dims, onesided=True, half=True)
    steps: list[Step] = []
    for what, name, elements in walk.steps:
        nbytes = elements * (2 if name == "real copy" else 4)
        taken = launch_scratch(name, nbytes) if what == "plan" else Take(name, nbytes)
        steps.append(Drop(name) if what == "drop" else taken)
    if argument(op, 3, "onesided") or walk.shape == x.shape:
        return [*steps, Out(0)]
    return [*steps, Take("onesided", math.prod(walk.shape) * 8), Out(0)]


FFT: dict[str, Rule] = {f"_fft_{kind}.default": _transform for kind in ("c2c", "r2c", "c2r")}

ASSUMED: dict[str, str] = dict.fromkeys(
    FFT,
    "workspaces of Fourier transforms are assumed: one complex copy of each signal; cuFFT tells the true size "
    "on a GPU only (its documentation: 8 copies at worst)",
)
"""Operators whose library takes memory that no rule knows, and what is said of it."""
