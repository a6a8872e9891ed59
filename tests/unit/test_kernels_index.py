"""Scratch of CUB, and rules of indexing and sorting; expected bytes were measured on the phantom device."""

from __future__ import annotations

import pytest

from fxmem.kernels import cub, expand
from fxmem.kernels.copies import copies, dense, elementwise
from fxmem.kernels.rules import RULES
from fxmem.kernels.steps import Out, Size, Take, Target
from fxmem.tape import Op, Phase, Ref, Role, Storage, Tape, TensorMeta

T4 = Target(sm=75, sm_count=40)
A100 = Target(sm=80, sm_count=108)
H200 = Target(sm=90, sm_count=132)
B5090 = Target(sm=120, sm_count=170)


def meta(*shape, dtype="float32"):
    return dense(TensorMeta(0, shape, (0,) * len(shape), dtype))


def call(name, *arguments, outputs=(), phase=Phase.FORWARD):
    """An operator call; tensors among the arguments become references."""
    inputs = []

    def plain(value):
        if isinstance(value, TensorMeta):
            inputs.append(value)
            return Ref(len(inputs) - 1)
        if isinstance(value, list):
            return tuple(plain(v) for v in value)
        return value

    args = tuple(plain(a) for a in arguments)
    return Op(
        name=name, step=1, phase=phase, module="", source="", start=0, stop=0, inputs=tuple(inputs), outputs=outputs,
        args=args,
    )  # fmt: skip


def taken(op, target=H200):
    return [s.nbytes for s in RULES[op.name](op, target) if isinstance(s, Take)]


@pytest.mark.parametrize(
    ("count", "expected"), [(77, 1), (2304, 1), (3073, 55295), (5000, 87039), (40000, 653823), (3_000_000, 48672255)]
)
def test_radix_sort_of_int64_pairs_on_hopper(count, expected):
    assert cub.radix_sort(count, 8, 8, cub.bits_of(1031), H200) == expected


@pytest.mark.parametrize(("target", "expected"), [(T4, 914943), (A100, 4519423), (H200, 56063), (B5090, 56063)])
def test_radix_sort_of_halves_differs_by_architecture(target, expected):
    assert cub.radix_sort(5000, 2, 8, 16, target) == expected


@pytest.mark.parametrize(
    ("count", "itemsize", "primitive", "expected"),
    [
        (1, 4, True, 1023),
        (1, 8, True, 1279),
        (1_000_000, 4, True, 5119),
        (1_000_000, 2, False, 3327),
        (100_000, 8, True, 2815),
    ],
)
def test_scan(count, itemsize, primitive, expected):
    assert cub.scan(count, itemsize, primitive=primitive) == expected


@pytest.mark.parametrize(("target", "expected"), [(T4, 63487), (A100, 18175), (H200, 10239), (B5090, 12287)])
def test_select(target, expected):
    assert cub.select_flagged(5_000_000, target) == expected


def test_small_embedding_gradient_is_not_sorted():
    op = call("embedding_dense_backward.default", meta(3072, 17), meta(3072, dtype="int64"), 1031, -1, False)
    assert taken(op) == []


def test_embedding_gradient():
    op = call("embedding_dense_backward.default", meta(5000, 17), meta(5000, dtype="int64"), 1031, -1, False)
    assert taken(op) == [40000, 40000, 40000, 87039, 40000, 8, 40000, 1279, 8248, 8248, 1279, 8, 12248, 104108]


def test_few_rows_are_added_to_in_float():
    op = call(
        "embedding_dense_backward.default", meta(8192, 33, dtype="float16"), meta(8192, dtype="int64"), 2, -1, False
    )
    assert taken(op)[-2:] == [6568, 264]


def test_accumulation_by_index_checks_and_sorts():
    x, index, value = meta(1031, 17), meta(100, dtype="int64"), meta(100, 17)
    op = call("index_put_.default", x, [index], value, True)
    assert taken(op) == [8, 8, 1, 1, 800, 800, 800, 800, 800, 1]
    backward = call("index_put_.default", x, [index], value, True, phase=Phase.BACKWARD)
    assert taken(backward) == [800, 800, 800, 800, 800, 1]


def test_broadcast_indices_are_made_uniform():
    op = call("index.Tensor", meta(31, 33, 17), [meta(10, 1, dtype="int64"), meta(20, dtype="int64")])
    assert taken(op) == [1600, 1600]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((37, 1000), [8000]),
        ((5000,), [40000, 70143]),
        ((2, 4097), [65552, 65552, 32776, 109567, 4607]),
        ((500, 5000), [20000000, 30000383]),
    ],
)
def test_sort(shape, expected):
    assert taken(call("sort.default", meta(*shape))) == expected


def test_topk_over_several_blocks():
    op = call("topk.default", meta(100_000), 5)
    assert taken(op) == [4, 8, 8, 50176, 1024, 392, 392, 1279, 1279]
    assert taken(call("topk.default", meta(37, 1000), 5)) == []


def test_roll_over_two_dimensions_goes_through_a_temporary():
    steps = RULES["roll.default"](call("roll.default", meta(5, 14, 14, 96), (-3, -3), (1, 2)), H200)
    assert steps == [Take("rolled 0", 376320), Out(0)]


def test_elementwise_follows_the_first_operand_s_order():
    transposed = meta(7, 33, 17)._replace(stride=(561, 1, 33))
    assert copies(elementwise(transposed, meta(7, 33, 17)))
    assert not copies(elementwise(meta(7, 33, 17), transposed))
    expanded = meta(7, 33, 17)._replace(stride=(33, 1, 0))
    assert not copies(elementwise(expanded, meta(7, 33, 17)))


def test_a_result_that_cuda_leaves_empty_takes_nothing():
    x = meta(7, 33)
    op = call("log_sigmoid_forward.default", x, outputs=(x._replace(storage=1), x._replace(storage=2)))
    storages = tuple(Storage(nbytes=924, role=Role.ACTIVATION, shape=(7, 33), dtype="float32", op=0) for _ in range(3))
    tape = Tape(
        batch=1, steps=1, storages=storages, events=(0, 1, 2, ~1, ~2), step_starts=(1,),
        ops=(Op(**{f: getattr(op, f) for f in op.__slots__} | {"start": 1, "stop": 3}),),
    )  # fmt: skip
    assert RULES[op.name](op, H200) == [Out(0), Size(1, 0)]
    assert [s.nbytes for s in expand(tape, H200).storages] == [924, 924, 0]
