"""Long sweeps stay outside CI: the first values of a parameter run always, the rest with ``-m sweep``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def first_of(values: Sequence[Any], count: int = 1) -> list[Any]:
    """``values`` as parameters; those after the first ``count`` are marked ``sweep``."""
    rest = [pytest.param(value, marks=pytest.mark.sweep) for value in values[count:]]
    return [*values[:count], *rest]
