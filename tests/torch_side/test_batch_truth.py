"""The largest batch through the whole house: PyTorch's own limit, and what the API promises."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxmem
from fxmem.errors import UsageError
from fxmem.program import MAX_TRACES

MIB = 2**20

# Found by probing PyTorch's real allocator on the phantom device, one process a probe (shared/truth/max_batch.jsonl).
TRUTHS = [
    ("torchvision:resnet50", "23.64GiB", "sm_89", {"optimizer": "sgd-momentum"}, 287),
    ("torchvision:vit_b_16", "14.58GiB", "sm_75", {"optimizer": "adamw", "amp": "float16"}, 195),
    ("hf:gpt2", "79.25GiB", "sm_80", {"optimizer": "adamw", "amp": "bfloat16", "seq": 1024}, 46),
]


@pytest.mark.slow
@pytest.mark.parametrize(("target", "memory", "arch", "options", "truth"), TRUTHS, ids=[row[0] for row in TRUTHS])
def test_it_is_pytorchs_own_limit(target, memory, arch, options, truth):
    pytest.importorskip("torchvision" if target.startswith("torchvision") else "transformers")
    report = fxmem.max_batch(
        target, device=fxmem.find_device(memory, arch=arch, context=0), safety=1, mode=fxmem.Mode.TRAINING,
        conv_workspace=fxmem.ConvWorkspace.NONE, **options,
    )  # fmt: skip
    assert (report.batch, report.best.answer.proved, report.best.answer.traces) == (truth, True, 0)


def model():
    return nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))


def inputs(batch):
    return torch.zeros(batch, 512)


def test_the_answer_is_that_of_estimate():
    options = {"mode": fxmem.Mode.TRAINING, "device": fxmem.find_device("512MiB", context=100 * MIB), "safety": 0.8}
    report = fxmem.max_batch(model, inputs, **options)
    estimate = fxmem.estimate(model, inputs, **options)
    assert estimate.max_batch is not None
    assert estimate.max_batch.batch == report.batch > 0
    assert (estimate.max_batch.safety, estimate.max_batch.proved) == (0.8, True)


def test_batch_and_the_next_are_traced_and_replayed():
    report = fxmem.max_batch(model, inputs, mode=fxmem.Mode.TRAINING, device="512MiB", safety=0.7, reserve_bytes=MIB)
    room = int(511 * MIB * 0.7)
    assert report.best.answer.allocator_bytes == room
    for batch, fits in ((report.batch, True), (report.batch + 1, False)):
        estimate = fxmem.estimate(model, inputs, mode=fxmem.Mode.TRAINING, batch=batch, law=False,
                                  device=fxmem.find_device(f"{room}", context=0))  # fmt: skip
        assert estimate.fits is fits


def test_out_of_memory_figures_are_those_without_a_limit():
    small = fxmem.estimate(model, inputs, batch=4096, device=fxmem.find_device("64MiB", context=0), law=False)
    free = fxmem.estimate(model, inputs, batch=4096, law=False)
    assert small.fits is False
    assert small.peak.reserved_bytes == free.peak.reserved_bytes > 64 * MIB
    assert len(small.steps) == 2


def test_the_context_counts():
    peak = fxmem.estimate(model, inputs, law=False).peak.reserved_bytes
    for context, fits in ((10 * MIB, True), (10 * MIB + 1, False)):
        device = fxmem.find_device(str(peak + 10 * MIB), context=context)
        assert fxmem.estimate(model, inputs, device=device, law=False).fits is fits


def test_several_devices_share_the_traces():
    report = fxmem.max_batch(model, inputs, device=["2GiB", "1GiB"], batch=3)
    assert [entry.device.name for entry in report.devices] == ["1GiB", "2GiB"]
    assert report.devices[0].answer.batch < report.devices[1].answer.batch
    half = fxmem.max_batch(model, inputs, device="2GiB", processes=2)
    assert half.batch == report.devices[0].answer.batch


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x).abs()


def test_the_answer_has_the_notes_of_what_kernels_take():
    """As an estimate has them: along the batch by the law, and without one where the answer was traced."""
    one = fxmem.estimate(Spectrum, inputs, device="64MiB", batch=2)
    assumed = [note for note in one.coverage.notes if "Fourier" in note]
    assert assumed
    report = fxmem.max_batch(Spectrum, inputs, device="64MiB")
    assert report.best.scaling.exact
    assert set(assumed) < {*report.coverage.notes, ""}
    uneven = fxmem.max_batch(nn.Sequential(Uneven(), Spectrum()), inputs, device="64MiB")
    assert not uneven.best.scaling.exact
    assert set(assumed) < {*uneven.coverage.notes, ""}


def test_the_curve_passes_the_answer_of_every_device():
    report = fxmem.max_batch(model, inputs, device=["64MiB", "1GiB"], curve=True)
    small, large = report.devices
    assert small.answer.batch * 2 < large.answer.batch < small.curve[-1].batch
    assert small.curve[-1].nbytes > large.answer.allocator_bytes
    assert not large.curve


class Uneven(nn.Module):
    """Pads to a third more samples, so no law holds."""

    def forward(self, x):
        return torch.cat([x, x[: len(x) // 3]]).relu()


class Alternating(nn.Module):
    """Takes another way at odd batches, with more memory."""

    def forward(self, x):
        return x.repeat(4, 1) if len(x) % 2 else x.relu()


def test_without_a_law_it_traces():
    report = fxmem.max_batch(Uneven, inputs, device="512MiB")
    answer = report.best.answer
    assert not report.best.scaling.exact
    assert answer.proved
    assert 0 < answer.traces <= 8


def test_an_estimate_traces_nothing_more():
    found = fxmem.estimate(Uneven, inputs, device="512MiB", batch=16)
    assert not found.scaling.exact
    assert (found.max_batch.batch, found.max_batch.proved) == (None, False)
    assert any("was not traced" in note for note in found.coverage.notes)


def test_what_is_not_proved_is_said():
    report = fxmem.max_batch(Alternating, inputs, device="512MiB")
    answer = report.best.answer
    assert answer.traces <= MAX_TRACES
    assert answer.proved or any("not proved" in note for note in report.coverage.notes)


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "truth"), [("eager", 6811), ("sdpa", 18907)])
def test_the_longest_sequence(attention, truth):
    """Held against PyTorch on the phantom device with 14.4 GiB: it runs at this length, and not with one token more."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 4, "num_attention_heads": 8,
             "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 65536}  # fmt: skip
    report = fxmem.max_batch(
        "hf:llama", device=fxmem.find_device("14.4GiB", context=0), safety=1, mode=fxmem.Mode.TRAINING,
        attn=attention, model_args=tuple(sizes.items()), vary=fxmem.Vary("seq", 128, 32768),
    )  # fmt: skip
    assert (report.batch, report.best.answer.proved) == (truth, True)
    assert report.best.answer.traces <= 6


def test_what_does_not_follow_the_axis_is_said():
    with pytest.raises(UsageError, match="seq changes nothing"):
        fxmem.max_batch(model, inputs, device="512MiB", vary=fxmem.Vary("seq", 1, 100))


def test_fixed_inputs_have_no_largest_batch():
    assert fxmem.estimate(model(), inputs(4), batch=4, device="t4").max_batch is None


def test_a_limit_is_needed():
    with pytest.raises(UsageError, match="needs a limit"):
        fxmem.max_batch(model, inputs, device=fxmem.find_device())


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 12, 13, 30])
def test_what_grows_by_thirds_is_no_line_to_estimate(batch):
    assert not fxmem.estimate(Uneven, inputs, batch=batch).scaling.exact


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 64])
def test_the_law_of_estimate_reaches_down_to_one(batch):
    scaling = fxmem.estimate(model, inputs, batch=batch, mode=fxmem.Mode.TRAINING).scaling
    assert scaling.exact
    assert scaling.pieces[0].from_batch == 1


def test_inputs_may_ask_for_the_axis():
    def asked(batch, seq=32):
        return torch.zeros(batch, seq, 512)

    options = {"device": fxmem.find_device("256MiB", context=0), "safety": 1}
    answer = fxmem.max_batch(model, asked, vary=fxmem.Vary("seq", 16, 100_000), **options).best.answer
    assert answer.proved
    plain = fxmem.max_batch(model, lambda batch: torch.zeros(batch, 512), **options)
    assert answer.batch == plain.batch
    assert fxmem.estimate(model, asked, law=False).breakdown.inputs == 32 * 512 * 4


def test_inputs_must_follow_the_axis():
    def needy(batch, image):
        return torch.zeros(batch, 512)

    with pytest.raises(UsageError, match=r"inputs\(batch, image\)"):
        fxmem.max_batch(model, needy, device="512MiB", vary=fxmem.Vary("image", 32, 64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": None}, "the largest batch needs a limit"),
        ({"device": []}, "no device is given"),
        ({"device": 24}, "the device is 24"),
        ({"device": "t4", "vary": "image=64..2048"}, r"vary is 'image=64..2048'\n  next: give fxmem.Vary"),
    ],
)
def test_options_of_another_type(options, message):
    with pytest.raises(UsageError, match=message):
        fxmem.max_batch(model, inputs, **options)
