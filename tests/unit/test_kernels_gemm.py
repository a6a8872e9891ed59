"""Workspaces of matrix products, by torch release and GPU, as PyTorch asked its allocator on the phantom device."""

from __future__ import annotations

import pytest

from fxmem.kernels.gemm import GEMM
from fxmem.kernels.reductions import row_major
from fxmem.kernels.steps import Drop, Out, Take, Target
from fxmem.tape import Op, Phase, Ref, TensorMeta

MIB = 1 << 20
DEFAULT = 8519680


def dense(*shape, dtype="float32"):
    return TensorMeta(0, shape, row_major(shape), dtype)


def takes(target, name="addmm.default", *, bias=None, right=None, **kwargs):
    """Bytes and whether they are kept, in order."""
    bias, right = bias or dense(256), right or dense(128, 256)
    tensors = (bias, dense(64, right.shape[0]), right) if name != "mm.default" else (dense(64, 128), right)
    op = Op(
        name=name, step=1, phase=Phase.FORWARD, module="", source="", start=0, stop=0, inputs=tensors,
        outputs=(dense(64, right.shape[1]),), args=tuple(Ref(i) for i in range(len(tensors))),
        kwargs=tuple(kwargs.items()),
    )  # fmt: skip
    steps = GEMM[name](op, target)
    assert steps[0] == Out(0)
    assert not any(isinstance(s, Drop) for s in steps)
    return [(s.nbytes, s.keep) for s in steps if isinstance(s, Take)]


def torch(minor, sm=90):
    return Target(sm=sm, sm_count=132, torch_version=(2, minor))


@pytest.mark.parametrize("name", ["addmm.default", "_addmm_activation.default", "_scaled_mm.default"])
def test_cublaslt_has_a_workspace_of_its_own_for_the_call_then_for_good_then_none(name):
    for minor in (6, 7, 8):
        assert takes(torch(minor), name) == [(MIB, False), (32 * MIB, True)]
    for minor in (9, 10, 11):
        assert takes(torch(minor), name) == [(32 * MIB, True), (MIB, True)]
    for minor in (12, 13, 14):
        assert takes(torch(minor), name) == [(32 * MIB, True)]


def test_cublaslt_serves_a_bias_of_one_dimension_only():
    cublas = [(32 * MIB, True)]
    assert takes(torch(6), "mm.default") == cublas
    for bias in (dense(64, 256), dense(1, 256), dense(1), TensorMeta(0, (256,), (2,), "float32")):
        assert takes(torch(6), bias=bias) == cublas
    assert takes(torch(6), bias=dense(1), right=dense(128, 1)) == cublas
    assert takes(torch(6), right=dense(1, 256)) == cublas
    assert takes(torch(6), bias=dense(256, dtype="complex64")) == cublas
    assert takes(torch(6), beta=0.5) == cublas
    assert takes(torch(6), beta=1, alpha=2) != cublas


@pytest.mark.parametrize("sm", [100, 120])
def test_blackwell_has_the_large_workspace_from_2_12_on(sm):
    assert takes(torch(8, sm), "mm.default") == [(DEFAULT, True)]
    assert takes(torch(11, sm), "mm.default") == [(DEFAULT, True)]
    assert takes(torch(12, sm), "mm.default") == [(32 * MIB, True)]
    assert takes(torch(14, 80), "mm.default") == [(DEFAULT, True)]
