"""The check at start-up, for a device that is named and for the one that is there."""

from __future__ import annotations

import pickle
import types

import pytest
import torch
from torch import nn

import fxmem
from fxmem.errors import DoesNotFitError, UsageError
from fxmem.preflight import preflight, this_gpu

MIB = 2**20


def model():
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))


def inputs(batch):
    return torch.zeros(batch, 512)


def test_it_returns_the_estimate():
    assert preflight(model, inputs, device="1GiB", batch=4).batch == 4


def test_it_says_what_to_change():
    with pytest.raises(DoesNotFitError) as caught:
        preflight(model, inputs, device=fxmem.find_device("128MiB", context=10 * MIB), batch=10_000)
    error = caught.value
    assert error.have_bytes == 128 * MIB
    assert error.need_bytes > error.have_bytes
    assert 0 < error.largest_batch < 10_000
    text = str(error)
    assert "batch 10000 needs" in text
    assert "128MiB has 128.0 MiB" in text
    assert "too much" in text
    assert f"at most {error.largest_batch}" in text
    assert preflight(model, inputs, device="118MiB", batch=error.largest_batch).fits
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.need_bytes) == (text, error.need_bytes)


def test_what_is_not_counted_is_said():
    with pytest.raises(DoesNotFitError) as caught:
        preflight(model, inputs, device="128MiB", batch=10_000)
    text = str(caught.value)
    assert "MiB without the CUDA context, which is unknown, 128MiB has" in text.replace("(", "").replace(")", "")
    assert "at least" in text
    assert f"a batch of at most {caught.value.largest_batch} (without the CUDA context, which is unknown)" in text
    assert str(preflight(model, inputs, device="128MiB", batch=4)).endswith("if the CUDA context (unknown) does too")


class Selecting(nn.Module):
    """Picks what depends on values, so that its figures are a lower bound."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(512, 512)

    def forward(self, x):
        y = self.layer(x)
        return y, torch.nonzero(y)


def test_a_lower_bound_is_said():
    device = fxmem.find_device("128MiB", context=0)
    found = preflight(Selecting, inputs, device=device, batch=4)
    assert found.coverage.lower_bound
    assert str(found).endswith("if what is not modelled does too")
    with pytest.raises(DoesNotFitError, match=r"MiB \(without what is not modelled\), 128MiB has .*: at least"):
        preflight(Selecting, inputs, device=device, batch=100_000)


def test_safety_counts():
    need = fxmem.estimate(model, inputs, batch=4096, law=False).peak.reserved_bytes
    device = fxmem.find_device(str(need + 4 * MIB), context=0)
    assert preflight(model, inputs, device=device, batch=4096).fits
    with pytest.raises(DoesNotFitError):
        preflight(model, inputs, device=device, batch=4096, safety=0.9)
    with pytest.raises(DoesNotFitError):
        preflight(model, inputs, device=device, batch=4096, reserve_bytes=8 * MIB)


def test_a_device_is_needed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no GPU"):
        preflight(model, inputs)
    with pytest.raises(UsageError, match="needs a limit"):
        preflight(model, inputs, device=fxmem.find_device())


def test_the_gpu_of_this_process(monkeypatch):
    properties = types.SimpleNamespace(name="NVIDIA T4", major=7, minor=5, multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (100 * MIB, 200 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 28 * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    gpu = this_gpu()
    assert (gpu.arch, gpu.capacity_bytes, gpu.context_bytes) == ("sm_75", 128 * MIB, 0)
    with pytest.raises(DoesNotFitError, match=r"NVIDIA T4 has 128\.0 MiB"):
        preflight(model, inputs, batch=10_000)
