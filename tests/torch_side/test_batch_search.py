"""The search where no law holds, through the whole house: losses over all pairs, ranges, models that do not run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxmem
from fxmem.errors import FxmemError, UsageError

MIB = 2**20
TRAIN = {"mode": fxmem.Mode.TRAINING, "device": fxmem.find_device("2GiB", context=0), "safety": 1}


def model():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def inputs(batch):
    return torch.zeros(batch, 64)


def contrast(output):
    """Each sample against each other, as CLIP does: memory is quadratic in the batch."""
    return nn.functional.cross_entropy(output @ output.t(), torch.arange(len(output), device=output.device))


@pytest.mark.parametrize("batch", [1, 4096, 100_000])
def test_a_contrastive_loss_has_a_largest_batch(batch):
    report = fxmem.max_batch(model, inputs, loss=contrast, batch=batch, **TRAIN)
    answer = report.best.answer
    assert answer.proved
    assert answer.traces <= 8
    assert "its size in bytes" in report.best.scaling.why
    assert "flops" not in report.best.scaling.why
    for at, fits in ((report.batch, True), (report.batch + 1, False)):
        options = {**TRAIN, "batch": at, "law": False}
        assert fxmem.estimate(model, inputs, loss=contrast, **options).fits is fits


class OverTheBatch(nn.Module):
    """Attention whose sequence is the batch: its FLOPs are quadratic, its memory is not."""

    def forward(self, x):
        q = x.view(1, 1, *x.shape)
        return nn.functional.scaled_dot_product_attention(q, q, q)


def test_flops_do_not_cost_the_law():
    report = fxmem.max_batch(OverTheBatch, lambda batch: torch.zeros(batch, 64, dtype=torch.float16),
                             device="rtx-4090", dtype="float16")  # fmt: skip
    assert report.best.scaling.exact
    assert (report.best.answer.proved, report.best.answer.traces) == (True, 0)


class Positions(nn.Module):
    """Knows 300 positions."""

    def __init__(self):
        super().__init__()
        self.known = nn.Parameter(torch.zeros(300, 64))

    def forward(self, x):
        if x.shape[1] > len(self.known):
            raise IndexError("index out of range in self")
        return x + self.known[: x.shape[1]]


def along(batch, seq):
    return torch.zeros(batch, seq, 64)


def test_what_does_not_run_bounds_the_range():
    report = fxmem.max_batch(Positions, along, vary=fxmem.Vary("seq", 16, 4096), device="8GiB")
    answer = report.best.answer
    assert (report.batch, answer.proved, str(answer.bound), answer.next) == (300, True, "program", None)
    assert any("seq 301 and more do not run" in note and "index out of range" in note for note in answer.notes)
    assert report.to_dict()["devices"][0]["bound"] == "program"


def test_a_range_in_which_nothing_runs_says_why():
    with pytest.raises(FxmemError, match="index out of range"):
        fxmem.max_batch(Positions, along, vary=fxmem.Vary("seq", 301, 4096), device="8GiB")


def test_only_multiples_are_traced():
    sizes = []

    def pictures(batch, image):
        sizes.append(image)
        return torch.zeros(batch, 3, image, image)

    options = {"device": "8GiB", "mode": fxmem.Mode.INFERENCE}
    report = fxmem.max_batch(nn.Identity, pictures, vary=fxmem.Vary("image", 100, 200), **options)
    assert (report.batch, str(report.best.answer.bound)) == (192, "range")
    assert {128, 192} <= set(sizes)
    assert 100 not in sizes
    with pytest.raises(UsageError, match=r"no multiple of 32 lies in image=100\.\.120"):
        fxmem.max_batch(nn.Identity, pictures, vary=fxmem.Vary("image", 100, 120), **options)
