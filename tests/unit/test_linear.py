"""The line through measurements, and the textbook's formula beside the replay."""

from __future__ import annotations

import pytest
from tapes import TapeBuilder

from fxmem.allocator import AllocatorConfig
from fxmem.batch import Limits, largest
from fxmem.errors import UsageError
from fxmem.kernels import Target
from fxmem.law import fit
from fxmem.linear import Linear, fit_line
from fxmem.program import Tapes

MIB = 2**20


def test_four_measurements():
    found = fit_line({1: 1024 * MIB, 2: 1536 * MIB, 4: 2560 * MIB, 8: 4608 * MIB})
    assert found == Linear(fixed_bytes=512 * MIB, per_sample_bytes=512 * MIB, residual_bytes=0)
    assert found.at(16) == 8704 * MIB


def test_least_squares():
    found = fit_line({1: 100, 2: 230, 3: 300})
    assert found == Linear(fixed_bytes=10, per_sample_bytes=100, residual_bytes=20)


def test_one_measurement_is_no_line():
    with pytest.raises(UsageError, match="two batches"):
        fit_line({4: 100})
    with pytest.raises(UsageError, match="does not grow"):
        fit_line({1: 100, 2: 100}).safe_batch(1000)


@pytest.mark.parametrize(("gib", "safety"), [(16, 0.9), (24, 0.8), (80, 0.7), (1, 1.0)])
def test_the_textbook_formula_is_the_replay(gib, safety):
    """Where the law has one piece: safe batch = (available x safety - fixed) / per sample."""

    def tape(batch):
        b = TapeBuilder(batch).keep("w", (128 * MIB,))
        for _ in (1, 2):
            b.step().op("relu.default", reads=["w"], makes={"y": (batch, 128 * MIB)}).free("y")
        return b.build()

    program = Tapes(fit([tape(batch) for batch in (1, 2, 3)]), 2, Target(sm=90, sm_count=132))
    line = fit_line({batch: program.law.requested_peak(batch) for batch in (1, 2, 4, 8)})
    assert (line.fixed_bytes, line.per_sample_bytes, len(program.law.pieces())) == (512 * MIB, 512 * MIB, 1)
    answer = largest(program, AllocatorConfig(), Limits(capacity_bytes=gib << 30, safety=safety))
    assert answer.batch == line.safe_batch(gib << 30, safety)
