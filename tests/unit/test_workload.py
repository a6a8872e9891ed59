from __future__ import annotations

import dataclasses

import pytest

from fxmem.errors import UsageError
from fxmem.workload import Mode, Workload


def test_steps_of_the_reference_loop():
    assert Workload().step_count == 2
    assert Workload(mode=Mode.GENERATION).step_count == 2
    assert Workload(mode=Mode.TRAINING).step_count == 3
    assert Workload(mode=Mode.TRAINING, steps=5).step_count == 5


def test_only_training_trains():
    assert [mode for mode in Mode if Workload(mode=mode).training] == [Mode.TRAINING]


@pytest.mark.parametrize("name", ["batch", "image", "seq", "accumulate", "new_tokens", "steps"])
def test_counts_are_positive(name):
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is 0"):
        Workload(**{name: 0})


@pytest.mark.parametrize(
    ("name", "value"), [("dtype", "float64"), ("amp", "float32"), ("mode", "train"), ("zero_grad", "no")]
)
def test_types_are_known(name, value):
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} {value} is unknown") as caught:
        Workload(**{name: value})
    assert {"dtype": "bfloat16", "amp": "bfloat16", "mode": "training", "zero_grad": "in-place"}[
        name
    ] in caught.value.hint


def test_it_is_frozen_and_hashable():
    workload = Workload()
    with pytest.raises(dataclasses.FrozenInstanceError):
        workload.batch = 2
    assert hash(workload) == hash(Workload())


@pytest.mark.parametrize("name", ["batch", "image", "seq", "accumulate", "new_tokens", "steps", "prompt"])
@pytest.mark.parametrize("value", ["8", 8.0])
def test_counts_are_whole_numbers(name, value):
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} is {value!r}, it must be a whole number"):
        Workload(**{name: value})


def test_numbers_of_other_libraries_become_pythons():
    class Eight:
        def __index__(self):
            return 8

    assert type(Workload(batch=Eight()).batch) is int


def test_an_optimizer_is_a_name():
    with pytest.raises(UsageError, match=r"not a name\n  next: .*package.module:NAME"):
        Workload(optimizer=dict)


def test_an_image_size_from_python_is_given():
    assert Workload(image=64).image_given
    assert not Workload().image_given
