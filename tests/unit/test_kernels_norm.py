"""Temporaries of normalisations: sizes as PyTorch 2.14's allocator was asked for them on the phantom device."""

from __future__ import annotations

import pytest

from fxmem.kernels.batch_norm import BATCH_NORM, uses_cudnn
from fxmem.kernels.norm import NORM
from fxmem.kernels.reductions import row_major
from fxmem.kernels.steps import Drop, Out, Take, Target
from fxmem.tape import Op, Phase, Ref, TensorMeta

H200 = Target(sm=90, sm_count=132)


def dense(shape, dtype="float32"):
    return TensorMeta(0, shape, row_major(shape), dtype)


def last(shape, dtype="float32"):
    _, c, h, w = shape
    return TensorMeta(0, shape, (c * h * w, 1, w * c, c), dtype)


def call(name, tensors, *args, results=3):
    """An operator call; ``None`` among the tensors is an argument that is not given."""
    given = [t for t in tensors if t is not None]
    refs, at = [], 0
    for t in tensors:
        refs.append(None if t is None else Ref(at))
        at += t is not None
    return Op(
        name=name, step=1, phase=Phase.FORWARD, module="", source="", start=0, stop=0, inputs=tuple(given),
        outputs=(dense((1,)),) * results, args=(*refs, *args),
    )  # fmt: skip


def takes(steps):
    return [step.nbytes for step in steps if isinstance(step, Take)]


def layer_norm_backward(rows, columns, dtype="float32", *, mask=(True, True, True)):
    x, stat, w = dense((rows, columns), dtype), dense((rows, 1)), dense((columns,), dtype)
    op = call("native_layer_norm_backward.default", [x, x], (columns,), *(Ref(i) for i in (2, 3, 4, 5)), mask)
    object.__setattr__(op, "inputs", (x, x, stat, stat, w, w))
    return NORM[op.name](op, H200)


def test_tall_layer_norm_sums_its_parameters_gradients_in_blocks():
    steps = layer_norm_backward(200000, 32)
    assert takes(steps) == [128, 128, 800000, 800000, 102400, 4, 102400, 4]
    assert [s.position for s in steps if isinstance(s, Out)] == [0, 1, 2]
    assert takes(layer_norm_backward(70000, 64, "float16"))[2:5] == [280064, 280064, 294912]


def test_layer_norm_of_few_or_wide_rows_takes_nothing():
    for rows, columns in ((65536, 128), (1000, 768), (100000, 4096)):
        assert layer_norm_backward(rows, columns) == [Out(0), Out(1), Out(2)]


def test_results_that_are_not_wanted_are_no_results():
    assert layer_norm_backward(1000, 64, mask=(False, True, True)) == [Out(0), Out(1)]


def test_layer_norm_copies_a_strided_input():
    x = TensorMeta(0, (50, 37, 24), (888, 1, 37), "float16")
    steps = NORM["native_layer_norm.default"](call("native_layer_norm.default", [x], (24,)), H200)
    assert steps == [Take("input", 88800), Out(0), Out(1), Out(2), Drop("input")]


@pytest.mark.parametrize(("dtype", "expected"), [("float32", [480, 480]), ("float16", [160, 160, 480, 480])])
def test_group_norm(dtype, expected):
    x, w = dense((5, 24, 37, 41), dtype), dense((24,), dtype)
    op = call("native_group_norm.default", [x, w, w], 5, 24, 1517, 8, 1e-5)
    assert takes(NORM[op.name](op, H200)) == expected


def test_group_norm_backward():
    x, stat, w = dense((5, 24, 37, 41), "float16"), dense((5, 8), "float16"), dense((24,), "float16")
    rest = (5, 24, 1517, 8)
    op = call("native_group_norm_backward.default", [x, x, stat, stat, w], *rest, (True, True, True))
    assert takes(NORM[op.name](op, H200)) == [480, 480, 160, 160, 480]
    op = call("native_group_norm_backward.default", [x, x, stat, stat, w], *rest, (False, True, True))
    assert takes(NORM[op.name](op, H200)) == [480, 480]


@pytest.mark.parametrize(
    ("dtype", "weight", "shape", "training", "cudnn"),
    [
        ("float32", "float32", (5, 24, 37, 41), True, True),
        ("float16", "float32", (5, 24, 37, 41), True, True),
        ("float16", "float16", (5, 24, 37, 41), True, False),
        ("bfloat16", "float32", (5, 24, 37, 41), True, False),
        ("float32", None, (5, 24, 37, 41), True, False),
        ("float32", "float32", (333, 24), True, False),
        ("float32", "float32", (70000, 24, 3), False, False),
        ("float32", "float32", (70000, 24, 3), True, True),
    ],
)
def test_which_batch_norm(dtype, weight, shape, training, cudnn):
    assert uses_cudnn(dtype, weight, shape, stats=True, training=training) is cudnn


def batch_norm(x, w, *, training=True):
    op = call("native_batch_norm.default", [x, w, w, w, w], training, 0.1, 1e-5)
    return BATCH_NORM[op.name](op, H200)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (dense((5, 24, 37, 41), "float16"), []),
        (last((5, 24, 37, 41), "float16"), [5760, 8]),
        (last((16, 64, 56, 56), "float16"), [131072, 8]),
        (dense((4096, 1024)), [262144, 128]),
        (dense((70000, 16)), [32768, 4]),
        (dense((333, 24)), []),
    ],
)
def test_batch_norm_with_channels_innermost_stages_its_sums(x, expected):
    assert takes(batch_norm(x, dense((x.shape[1],), x.dtype))) == expected


def test_batch_norm_on_cudnn_reads_a_dense_copy():
    x = dense((9, 24, 37, 41))._replace(stride=(72816, 3034, 41, 1))
    steps = batch_norm(x, dense((24,)))
    assert steps == [Take("input", 1310688), Out(0), Out(1), Out(2), Drop("input")]


def batch_norm_backward(grad, x, w, mask, *, training=True, saved=24):
    stat = dense((saved,))
    op = call("native_batch_norm_backward.default", [grad, x, w, w, w, stat, stat], training, 1e-5, mask)
    return BATCH_NORM[op.name](op, H200)


def test_batch_norm_backward():
    x, w = dense((5, 24, 37, 41)), dense((24,))
    assert batch_norm_backward(x, x, w, (True, True, True)) == [Out(0), Out(1), Out(2)]
    head = batch_norm_backward(x, x, w, (False, True, True))
    assert head == [Take("unwanted 0", 728160), Out(0), Out(1)]
    frozen = batch_norm_backward(x, x, w, (True, False, False), training=False, saved=0)
    assert frozen == [Take("invstd", 96), Out(0)]


def test_batch_norm_backward_with_channels_innermost():
    x, w = last((5, 24, 37, 41), "float16"), dense((24,), "float16")
    steps = batch_norm_backward(x, x, w, (True, True, True))
    assert takes(steps) == [96, 96, 2880, 8]
    assert [s.position for s in steps if isinstance(s, Out)] == [1, 2, 0]
