"""Pools, resampling and padding: the copies that their kernels make of operands that are not dense.

Each is one line of :data:`RESAMPLE`: what is made dense before the results, which results in
which order, what is made dense after them, and whose memory format it is made dense in.
Files are those of aten/src/ATen/native/cuda of torch 2.14.
"""

from __future__ import annotations

from collections.abc import Sequence

from fxmem.kernels.copies import copies, copy
from fxmem.kernels.steps import (
    Out,
    Rule,
    Size,
    Step,
    Take,
    Target,
    channels_last,
    nbytes,
    suggests_channels_last,
    tensor,
)
from fxmem.tape import Op


def _dense(
    *after: int, before: Sequence[int] = (), results: int = 1, like: int | None = None, scratch: Sequence[int] = ()
) -> Rule:
    """A rule of copies.

    Args:
        after: Positions of arguments made dense once the results exist, in order.
        before: The same for arguments made dense before.
        results: How many results there are.
        like: Position of the argument whose suggested memory format counts; row-major without.
        scratch: Results for which a row-major stand-in is taken where they are not row-major.
    """

    def steps(op: Op, target: Target) -> list[Step]:
        """See the line in :data:`RESAMPLE`."""
        model = tensor(op, like) if like is not None else None
        nhwc = model is not None and suggests_channels_last(model)
        found: list[Step] = []
        for position in before:
            found += copy(f"before {position}", tensor(op, position), nhwc=nhwc)
        found += [Out(i) for i in range(results)]
        for index in scratch:
            if index < len(op.outputs) and copies(op.outputs[index]):
                found.append(Take(f"result {index}", nbytes(op.outputs[index])))
        for position in after:
            found += copy(f"after {position}", tensor(op, position), nhwc=nhwc)
        return found

    return steps


def _adaptive_avg_backward(op: Op, target: Target) -> list[Step]:
    """``adaptive_avg_pool2d_backward_cuda`` (AdaptiveAveragePooling.cu): no copies for a channels-last input."""
    x = tensor(op, 1)
    if x is not None and suggests_channels_last(x):
        return [Out(0)]
    return [Out(0), *copy("grad", tensor(op, 0))]


def _adaptive_max_backward(op: Op, target: Target) -> list[Step]:
    """``adaptive_max_pool2d_backward_out_cuda`` (AdaptiveMaxPooling2d.cu): works on a row-major result."""
    steps: list[Step] = [Out(0), *copy("grad", tensor(op, 0)), *copy("indices", tensor(op, 2))]
    if op.outputs and copies(op.outputs[0]):
        steps.append(Take("result", nbytes(op.outputs[0])))
    return steps


def _columns(op: Op, target: Target) -> list[Step]:
    """``im2col_cuda`` (Im2Col.cu), ``col2im_cuda`` (Col2Im.cu): a result like the input is resized.

    Growing takes new memory; shrinking keeps the old.
    """
    x = tensor(op, 0)
    if x is None or not op.outputs:
        return [Out(0)]
    if nbytes(op.outputs[0]) <= nbytes(x):
        return [Size(0, nbytes(x)), Out(0), *copy("input", x)]
    return [Take("first", nbytes(x)), *copy("input", x), Out(0)]


def _upsample_aa(op: Op, target: Target) -> list[Step]:
    """``upsample_gen2d_aa_out_cuda_template`` (UpSampleBilinear2d.cu): row-major throughout."""
    steps: list[Step] = [Out(0)]
    if op.outputs and channels_last(op.outputs[0]) and copies(op.outputs[0]):
        steps.append(Take("result", nbytes(op.outputs[0])))
    return [*steps, *copy("input", tensor(op, 0))]


RESAMPLE: dict[str, Rule] = {
    # DilatedMaxPool2d.cu, AveragePool2d.cu, AdaptiveAveragePooling.cu, AdaptiveMaxPooling2d.cu
    "max_pool2d_with_indices.default": _dense(0, results=2, like=0),
    "max_pool2d_with_indices_backward.default": _dense(1, 0, 7, like=1),
    "avg_pool2d.default": _dense(0, like=0),
    "avg_pool2d_backward.default": _dense(1, 0, like=1),
    "_adaptive_avg_pool2d.default": _dense(before=(0,), like=0),
    "_adaptive_avg_pool2d_backward.default": _adaptive_avg_backward,
    "adaptive_max_pool2d.default": _dense(0, results=2, scratch=(0, 1)),
    "adaptive_max_pool2d_backward.default": _adaptive_max_backward,
    # UpSampleNearest2d.cu, UpSampleBilinear2d.cu, UpSampleBicubic2d.cu
    "upsample_nearest2d.default": _dense(0, like=0),
    "upsample_nearest2d_backward.default": _dense(0, like=0),
    "upsample_bilinear2d_backward.default": _dense(0, like=0),
    "upsample_bicubic2d_backward.default": _dense(0),
    "_upsample_bilinear2d_aa.default": _upsample_aa,
    "_upsample_bicubic2d_aa.default": _upsample_aa,
    "_upsample_bilinear2d_aa_backward.default": _dense(0),
    "_upsample_bicubic2d_aa_backward.default": _dense(0),
    # ReflectionPad.cu, ReplicationPadding.cu
    **{
        f"{kind}_pad{n}d{way}.default": _dense(0)
        for kind in ("reflection", "replication")
        for n in (1, 2, 3)
        for way in ("", "_backward")
    },
    # MaxUnpooling.cu
    "max_unpool2d.default": _dense(before=(0, 1)),
    "max_unpool3d.default": _dense(before=(0, 1)),
    # Im2Col.cu, Col2Im.cu
    "im2col.default": _columns,
    "col2im.default": _columns,
}
