"""The straight line through measurements, and the textbook's largest batch. No torch.

Batch size against bytes by least squares: fixed bytes, bytes a sample, and what is left over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fxmem.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A line through measurements.

    >>> Linear(fixed_bytes=10, per_sample_bytes=20, residual_bytes=0).at(3)
    70
    """

    fixed_bytes: float
    per_sample_bytes: float
    residual_bytes: float
    """The largest distance of a measurement from the line."""

    def at(self, batch: int) -> float:
        """The line's bytes at a batch."""
        return self.fixed_bytes + self.per_sample_bytes * batch

    def safe_batch(self, available_bytes: int, safety: float = 1.0) -> int:
        """The largest batch by the formula ``(available x safety - fixed) / per sample``.

        Args:
            available_bytes: Of the device.
            safety: Share of it that may be used.

        Raises:
            UsageError: The line does not grow with the batch.
        """
        if self.per_sample_bytes <= 0:
            raise UsageError("the memory does not grow with the batch", hint="measure batches that lie further apart")
        return max(math.floor((available_bytes * safety - self.fixed_bytes) / self.per_sample_bytes), 0)


def fit_line(measured: Mapping[int, float]) -> Linear:
    """Fit bytes against batch.

    Args:
        measured: Bytes at each batch.

    Raises:
        UsageError: Fewer than two batches.

    >>> fit_line({1: 30, 3: 70}).per_sample_bytes
    20.0
    """
    if len(measured) < 2:
        raise UsageError("a line needs two batches", hint="measure one more batch size")
    mean_x, mean_y = sum(measured) / len(measured), sum(measured.values()) / len(measured)
    spread = sum((x - mean_x) ** 2 for x in measured)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in measured.items()) / spread
    fixed = mean_y - slope * mean_x
    residual = max(abs(fixed + slope * x - y) for x, y in measured.items())
    return Linear(fixed_bytes=fixed, per_sample_bytes=slope, residual_bytes=residual)
