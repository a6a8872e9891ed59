from __future__ import annotations

import inspect
import pickle

import pytest

from fxmem import errors
from fxmem.errors import FxmemError, OutOfMemoryError

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, FxmemError)]


def test_message_says_where_what_and_what_next():
    error = FxmemError("no such layer", where="model.py:3", hint="rename it")
    assert str(error) == "model.py:3: no such layer\n  next: rename it"
    assert str(FxmemError("no such layer")) == "no such layer"


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_survives_a_process_pool(cls):
    error = pickle.loads(pickle.dumps(cls("what", where="where", hint="hint")))
    assert type(error) is cls
    assert (error.what, error.where, error.hint) == ("what", "where", "hint")


def test_out_of_memory_keeps_its_facts():
    error = OutOfMemoryError("no room", requested_bytes=1, allocated_bytes=2, reserved_bytes=3, capacity_bytes=4)
    facts = (error.requested_bytes, error.allocated_bytes, error.reserved_bytes, error.capacity_bytes)
    assert facts == (1, 2, 3, 4)
