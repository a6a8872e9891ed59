"""A workspace as what it is made of: copies of the operands in another layout, and a rest.

cuDNN's kernels want channels last, whole tiles of channels and, when they split the sum over
pixels, room for partial results. So most workspaces are exactly ``a X + b W + c Y + rest`` with
small whole numbers, where X, W and Y are the operands' dense sizes, and a rest of some bytes
(alignment): three quarters of the answers for 920 convolutions on sm_80 and four fifths on sm_90.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from fxmem.cudnn.question import Convolution

_ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}

COMBINATIONS = tuple((a, b, c) for a in range(3) for b in range(4) for c in range(3))
"""Copies of x, w and y; four of w are as far as partial sums in float32 of half precision go in pairs."""

_COPY = 0.005
"""What a copy must explain, as a fraction of all operands; keeps chance sums of many copies out."""


class Parts(NamedTuple):
    """``a X + b W + c Y + rest``."""

    copies: tuple[int, int, int]
    rest: int

    def nbytes(self, operands: tuple[int, int, int]) -> int:
        """Bytes, for operands of these sizes."""
        return sum(n * size for n, size in zip(self.copies, operands, strict=True)) + self.rest


def operands(question: Convolution) -> tuple[int, int, int]:
    """Bytes of dense x, w and y.

    >>> operands(Convolution(x=(8, 64, 56, 56), w=(64, 64, 1, 1), stride=(1, 1), padding=(0, 0), dilation=(1, 1)))
    (6422528, 16384, 6422528)
    """
    size = _ITEMSIZE.get(question.dtype, 4)
    return size * math.prod(question.x), size * math.prod(question.w), size * math.prod(question.y)


def parts(nbytes: int, sizes: tuple[int, int, int]) -> Parts:
    """Take a workspace apart: a small rest, but no more copies than that is worth."""
    candidates = (Parts(n, nbytes - Parts(n, 0).nbytes(sizes)) for n in COMBINATIONS)
    price = _COPY * sum(sizes)
    return min((c for c in candidates if c.rest >= 0), key=lambda c: c.rest + price * sum(c.copies))


def spread(pairs: Iterable[tuple[int, int]], sizes: Iterable[int], share: float = 0.9) -> tuple[float, float]:
    """How far answers lie from expectations, relative to the operands' bytes.

    Args:
        pairs: Expected and found bytes.
        sizes: Bytes of the operands of each.
        share: Of the cases that shall lie within; the same number is left out on either side.

    Returns:
        The lower bound (not positive) and the upper (not negative), as fractions of the operands.
    """
    found = sorted((real - expected) / max(size, 1) for (expected, real), size in zip(pairs, sizes, strict=True))
    if not found:
        return 0.0, 0.0
    cut = int(len(found) * (1 - share) / 2)
    return min(found[cut], 0.0), max(found[-1 - cut], 0.0)
