"""What all tests on the phantom device need: a python with a CUDA build of torch."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def python() -> str:
    """A python with a CUDA build of torch: ``PHANTOM_PYTHON``, else this one.

    The product runs without one, so the tests also pass where there is none; once ``PHANTOM_PYTHON`` is
    set, as ``.ci/test`` does where torch is such a build, what is missing is a failure.
    """
    found = os.environ.get("PHANTOM_PYTHON", sys.executable)
    libraries = list(Path(found).parents[1].glob("lib/python3*/site-packages/torch/lib/libtorch_cuda.so"))
    if sys.platform != "linux" or shutil.which("gcc") is None:
        why = "the phantom device needs Linux and gcc"
    elif not libraries:
        why = f"no CUDA build of torch in {found}: set PHANTOM_PYTHON to a python that has one"
    else:
        return found
    if "PHANTOM_PYTHON" in os.environ:
        pytest.fail(why)
    pytest.skip(why)
