"""Fourier transforms: stages, copies and strides as the phantom showed them (calibration/probe_fft.py)."""

from __future__ import annotations

from fxmem.kernels import expand
from fxmem.kernels.fft import ASSUMED, FFT, complex_to_complex, complex_to_real, real_to_complex
from fxmem.kernels.steps import Drop, Out, Take, Target
from fxmem.tape import Op, Phase, Ref, Role, Storage, Tape, TensorMeta

H200 = Target(sm=90, sm_count=132)
T4 = Target(sm=75, sm_count=40)
DENSE = (8 * 64 * 32, 64 * 32, 32, 1)
SHAPE = (16, 8, 64, 32)


def call(name, dtype, stride, out, *args):
    return Op(
        name=f"_fft_{name}.default", step=1, phase=Phase.FORWARD, module="", source="", start=0, stop=1,
        inputs=(TensorMeta(0, SHAPE, stride, dtype, 0),), outputs=(TensorMeta(1, SHAPE, DENSE, out, 0),),
        args=(Ref(0), *args), kwargs=(),
    )  # fmt: skip


def steps(name, dtype, stride, out, *args, target=H200):
    return FFT[f"_fft_{name}.default"](call(name, dtype, stride, out, *args), target)


def test_one_plan_takes_its_result_and_a_workspace():
    taken = steps("r2c", "float32", DENSE, "complex64", (2, 3), 0, True)
    assert taken == [Out(0), Take("cufft", 16 * 8 * 64 * 32 * 8, Role.WORKSPACE), Drop("cufft")]


def test_a_complex_to_real_transform_copies_its_input():
    taken = steps("c2r", "complex64", DENSE, "float32", (2, 3), 2, 62)
    assert taken[:2] == [Out(0), Take("copy", 16 * 8 * 64 * 32 * 8)]


def test_four_dimensions_take_two_buffers_and_the_second_is_the_result():
    taken = steps("c2c", "complex64", DENSE, "complex64", (0, 1, 2, 3), 0, True)
    assert [s for s in taken if not isinstance(s, Drop) and s[0] != "cufft"] == [
        Take("first", 16 * 8 * 64 * 32 * 8), Out(0),
    ]  # fmt: skip


def test_half_precision_copies_what_is_strided_along_the_signal():
    assert Take("real copy", 16 * 8 * 64 * 32 * 2) in steps("r2c", "float16", DENSE, "complex32", (0,), 0, True)
    assert Take("real copy", 16 * 8 * 64 * 32 * 4) not in steps("r2c", "float32", DENSE, "complex64", (0,), 0, True)


def test_bfloat16_is_transformed_as_it_is_from_sm_80_on_and_widened_before():
    native = steps("r2c", "bfloat16", DENSE, "complex64", (3,), 0, True)
    widened = steps("r2c", "bfloat16", DENSE, "complex64", (3,), 0, True, target=T4)
    assert native[0] == Take("first", 16 * 8 * 64 * 17 * 4)
    assert widened[0] == Take("float32", 16 * 8 * 64 * 32 * 4)


def test_a_batch_that_is_no_single_dimension_is_copied():
    apart = (1 << 20, 1 << 13, 32, 1)
    assert ("take", "complex copy", 16 * 8 * 64 * 32) not in complex_to_complex(SHAPE, apart, (1, 2, 3)).steps
    assert ("take", "complex copy", 16 * 8 * 64 * 32) in complex_to_complex(SHAPE, apart, (3,)).steps


def test_results_lie_with_the_transformed_dimensions_innermost():
    assert real_to_complex(SHAPE, DENSE, (1,), onesided=True).strides == (5 * 2048, 1, 5 * 32, 5)
    assert complex_to_real(SHAPE, DENSE, (3,), 62).strides == (8 * 64 * 62, 64 * 62, 62, 1)
    assert complex_to_complex(SHAPE, DENSE, (2, 3)).strides == DENSE


def test_what_is_assumed_of_the_library_is_said():
    op = call("r2c", "float32", DENSE, "complex64", (2, 3), 0, True)
    storages = tuple(Storage(nbytes=n, role=Role.TEMPORARY, shape=(n,), dtype="uint8", op=None) for n in (4, 8))
    tape = Tape(batch=1, steps=1, ops=(op,), storages=storages, events=(1,), step_starts=(0,))
    assert ASSUMED["_fft_r2c.default"] in expand(tape, H200).notes
