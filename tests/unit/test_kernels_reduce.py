"""Scratch memory of reductions: sizes as PyTorch 2.14's allocator was asked for them on the phantom device."""

from __future__ import annotations

import pytest

from fxmem.kernels.iterator import reduction, result_strides
from fxmem.kernels.losses import LOSSES
from fxmem.kernels.reductions import REDUCTIONS, converted, row_major
from fxmem.kernels.steps import Drop, Out, Take, Target
from fxmem.tape import Op, Phase, Ref, TensorMeta

GPUS = {75: 40, 80: 108, 90: 132, 120: 170}


def target(sm: int) -> Target:
    return Target(sm=sm, sm_count=GPUS[sm])


def dense(shape, dtype="float32", *, offset=0):
    return TensorMeta(0, shape, row_major(shape), dtype, offset)


def call(name, inputs, outputs, *args, **kwargs):
    return Op(
        name=name, step=1, phase=Phase.FORWARD, module="", source="", start=0, stop=0, inputs=tuple(inputs),
        outputs=tuple(outputs), args=(*(Ref(i) for i in range(len(inputs))), *args), kwargs=tuple(kwargs.items()),
    )  # fmt: skip


def takes(steps):
    return [step.nbytes for step in steps if isinstance(step, Take)]


CASES = [
    # operator, input, dim, per architecture: buffer and semaphores
    ("sum", dense((1 << 21,)), (), {75: (320, 4), 80: (1024, 4), 90: (1024, 4), 120: (1024, 4)}),
    ("sum", dense((7, 300001), "float16"), (1,), {75: (336, 28), 80: (1036, 28), 90: (1036, 28), 120: (1036, 28)}),
    ("sum", dense((200000, 6)), (0,), {75: (7680, 8), 80: (9408, 8), 90: (9408, 8), 120: (9408, 8)}),
    ("sum", dense((9000, 768), "bfloat16"), (0,), {75: (21233664, 24), 80: (55443456, 24), 90: (55443456, 24)}),
    ("mean", dense((16, 64, 112, 112)), (0, 2, 3), {75: (512, 256), 80: (1792, 256), 90: (2304, 256)}),
    ("mean", dense((16, 64, 112, 112)), (0, 2, 3), {120: (2048, 256)}),
]


@pytest.mark.parametrize(("name", "source", "dims", "expected"), CASES)
def test_scratch_of_sums(name, source, dims, expected):
    kept = tuple(n for d, n in enumerate(source.shape) if d not in dims) if dims else ()
    result = dense(kept, source.dtype)
    overload = ("dim_IntList" if name == "sum" else "dim") if dims else "default"
    op = call(f"{name}.{overload}", [source], [result], *([dims] if dims else []))
    for sm, sizes in expected.items():
        steps = REDUCTIONS[op.name](op, target(sm))
        assert takes(steps) == list(sizes), sm
        assert steps[0] == Out(0)
        assert steps[-2:] == [Drop("semaphores"), Drop("reduce buffer")]


def test_partial_results_are_as_wide_as_the_operator_needs():
    x = dense((7, 300001), "float16")
    argmax = call("argmax.default", [x], [dense((7,), "int64")], 1)
    assert takes(REDUCTIONS["argmax.default"](argmax, target(90))) == [4144, 28]
    both = call("aminmax.default", [x], [dense((7,), "float16")] * 2, dim=1)
    assert takes(REDUCTIONS["aminmax.default"](both, target(90))) == [1036, 28]
    flat = dense((1 << 21,))
    var = call("var.correction", [flat], [dense(())], None)
    assert takes(REDUCTIONS["var.correction"](var, target(90))) == [4096, 4]
    truth = call("any.default", [flat], [dense((), "bool")])
    assert takes(REDUCTIONS["any.default"](truth, target(90))) == [256, 4]


def test_channels_last_sum_follows_the_strides():
    x = TensorMeta(0, (8, 24, 57, 61), (83448, 1, 1464, 24), "float16")
    op = call("sum.dim_IntList", [x], [dense((24,), "float16")], (0, 2, 3))
    assert takes(REDUCTIONS["sum.dim_IntList"](op, target(90))) == [84480, 8]


def test_small_reductions_take_nothing():
    op = call("sum.default", [dense((100, 17))], [dense(())])
    assert REDUCTIONS["sum.default"](op, target(90)) == [Out(0)]


def test_bools_are_cast_before_they_are_summed():
    op = call("sum.default", [dense((100, 17), "bool")], [dense((), "int64")])
    assert REDUCTIONS["sum.default"](op, target(90)) == [Out(0), Take("cast", 13600), Drop("cast")]


def test_halves_are_summed_into_floats_without_a_cast():
    op = call("mean.default", [dense((100, 17), "bfloat16")], [dense(())])
    assert REDUCTIONS["mean.default"](op, target(90)) == [Out(0)]


def test_host_tensors_have_no_scratch():
    host = dense((1 << 21,))._replace(storage=-1)
    for name in REDUCTIONS:
        assert REDUCTIONS[name](call(name, [host], [dense(()), dense(())]), target(90)) is None


def test_reduction_in_parts_beyond_32_bits():
    x = dense((3, 1 << 30))
    whole = reduction(x, [dense(())], (), keepdim=False)
    parts = whole.split_for_32_bits()
    assert len(parts) > 1
    assert sum(part.numel for part in parts) == 3 << 30
    assert all(4 * part.numel <= 1 << 31 for part in parts)


def test_dimensions_coalesce():
    whole = reduction(dense((4, 5, 6)), [dense(())], (), keepdim=False)
    assert (whole.shape, whole.reduced_dims, whole.outputs) == ((120,), 1, 1)
    inner = reduction(dense((4, 5, 6)), [dense((4,))], (1, 2), keepdim=False)
    assert (inner.shape, inner.strides[-1]) == ((30, 4), (4, 120))


def test_strides_of_copies():
    slice_ = TensorMeta(0, (5, 100), (400, 2), "bool", 7)
    assert converted(slice_, "int64") == TensorMeta(0, (5, 100), (100, 1), "int64")
    transposed = TensorMeta(0, (5, 100), (1, 5), "bool")
    assert converted(transposed, "int64").stride == (1, 5)
    assert result_strides((9, 20, 3), [(0, 3, 1)]) == (60, 3, 1)


def test_losses_hold_the_unreduced_loss_meanwhile():
    x = dense((129, 1031))
    op = call("mse_loss.default", [x, x], [dense(())])
    steps = LOSSES["mse_loss.default"](op, target(90))
    assert steps[:2] == [Out(0), Take("loss", 531996)]
    assert takes(steps) == [531996, 68, 4]
    none = call("mse_loss.default", [x, x], [x], 0)
    assert LOSSES["mse_loss.default"](none, target(90)) is None


def test_total_weight_of_a_map_of_classes_comes_first():
    x, y = dense((3, 21, 65, 67)), dense((3, 65, 67), "int64")
    op = call("nll_loss2d_forward.default", [x, y], [dense(()), dense(())], None, 1, -100)
    assert LOSSES["nll_loss2d_forward.default"](op, target(90)) == [Out(1), Out(0)]
