"""Attention without a GPU: which back end each call takes, and what its kernels then allocate."""

from __future__ import annotations

import base64
import json
import warnings
import zlib
from pathlib import Path

import pytest
import torch
from attention_cases import LETTERS, Case, arguments, cases, setting
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812

from fxmem.cuda import personality
from fxmem.cuda.attention import Attention, batched, choose
from fxmem.device import find_device
from fxmem.kernels import Target, expand
from fxmem.recording.notes import to_tape
from fxmem.recording.recorder import Recorder
from fxmem.release import RELEASE, Release
from fxmem.tape import Phase

# What PyTorch 2.14.1, and the releases before it, answered on the phantom device (tests/attention_cases.py), packed.
GOLDEN = Path(__file__).parents[1] / "golden"
CHOSEN = json.loads((GOLDEN / "attention_choice.json").read_text(encoding="utf-8"))
EARLIER = json.loads((GOLDEN / "attention_choice_earlier.json").read_text(encoding="utf-8"))


def choice(case: Case, sm: int, release: Release = (2, 14)) -> str:
    given = arguments(case, "meta")
    call = Attention(
        query=given["query"], key=given["key"], value=given["value"], mask=given["attn_mask"],
        dropout=case.dropout, causal=case.causal, gqa=case.gqa, sm=sm, release=release,
    )  # fmt: skip
    with setting(case.setting):
        try:
            return LETTERS[choose(batched(call))]
        except RuntimeError:
            return "-"


@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 100, 120])
def test_chooses_as_pytorch_does(sm):
    wanted = zlib.decompress(base64.b85decode(CHOSEN[str(sm)])).decode()
    wrong = [(case, w, got) for case, w in zip(cases(), wanted, strict=True) if (got := choice(case, sm)) != w]
    assert not wrong, f"{len(wrong)} of {len(wanted)} differ, the first: {wrong[0]}"


@pytest.mark.parametrize("sm", [75, 80, 86, 90, 100])
@pytest.mark.parametrize("release", sorted(EARLIER))
def test_chooses_as_earlier_releases_do(release, sm):
    """Where user code asks for cuDNN first, what decides is the wheel's own cuDNN: left out."""
    wanted = zlib.decompress(base64.b85decode(EARLIER[release][str(sm)])).decode()
    asked = [(c, w) for c, w in zip(cases(), wanted, strict=True) if "cudnn" not in c.setting]
    major, minor = map(int, release.split("."))
    wrong = [(case, w, got) for case, w in asked if (got := choice(case, sm, (major, minor))) != w]
    assert not wrong, f"{len(wrong)} of {len(asked)} differ, the first: {wrong[0]}"


def events(sm: str, program) -> list[int]:
    """Bytes allocated (positive) and freed (negative) on the device while ``program`` runs."""
    device = find_device({"90": "h200", "80": "a100-80gb", "75": "t4"}[sm])
    recorder = Recorder(FakeTensorMode(allow_non_fake_inputs=True))
    recorder.phase = Phase.FORWARD
    with warnings.catch_warnings(), personality(recorder, device), recorder:
        warnings.simplefilter("ignore", UserWarning)
        recorder.begin_step(1)
        program()
    tape = to_tape(recorder, batch=1, training=True, modules=())
    tape = expand(tape, Target(sm=int(sm), sm_count=device.sm_count or 1, torch_version=RELEASE))
    sizes = [(e, tape.storages[e if e >= 0 else ~e]) for e in tape.events]
    return [s.nbytes if e >= 0 else -s.nbytes for e, s in sizes if s.nbytes and s.name not in ("cublas", "cublaslt")]


cudnn_first = pytest.mark.skipif(RELEASE < (2, 11), reason="torch asks cuDNN first from 2.11 on")
shared_heads = pytest.mark.skipif(RELEASE < (2, 13), reason="no fused kernel takes inputs without a batch")
STATE = [16, 8] if RELEASE >= (2, 7) else []
"""Flash attention's random numbers on the device."""
ZEROS = [8, 8] if RELEASE >= (2, 13) else []
"""Memory-efficient attention's, without dropout."""


def sdpa(dtype: torch.dtype, *, train: bool = False, **kw: object):
    def program() -> None:
        q, k, v = (torch.empty(3, 8, 129, 64, dtype=dtype, device="cuda", requires_grad=train) for _ in range(3))
        F.scaled_dot_product_attention(q, k, v, **kw)

    return program


def made(sm: str, program) -> list[int]:
    """What is allocated after the three inputs."""
    return [n for n in events(sm, program)[3:] if n > 0]


@cudnn_first
def test_cudnn_keeps_seed_and_offset_on_the_device_and_logarithms_for_a_backward_pass_only():
    assert made("90", sdpa(torch.float16)) == [8, 8, 396288]
    assert made("90", sdpa(torch.float16, train=True)) == [8, 8, 396288, 12384]


def test_flash_takes_the_random_state_twice_with_dropout():
    assert made("80", sdpa(torch.float16)) == [396288, 12384, *STATE]
    assert made("80", sdpa(torch.float16, dropout_p=0.1)) == [396288, 12384, *STATE, *STATE[:1]]


def test_efficient_attention_keeps_the_seed_on_the_host_with_dropout():
    assert made("80", sdpa(torch.float32)) == [*ZEROS, 792576]
    assert made("80", sdpa(torch.float32, train=True, dropout_p=0.1)) == [792576, 15360]


def test_a_mask_of_truth_values_is_converted_then_its_rows_are_aligned():
    def program() -> None:
        q, k, v = (torch.empty(3, 8, 129, 64, device="cuda") for _ in range(3))
        mask = torch.ones(3, 1, 129, 129, dtype=torch.bool, device="cuda")
        F.scaled_dot_product_attention(q, k, v, mask)

    assert made("80", program) == [49923, 4, 4, 199692, 210528, *ZEROS, 792576]


@shared_heads
def test_unbatched_inputs_take_the_fused_kernels():
    def program() -> None:
        q = torch.empty(8, 129, 64, dtype=torch.float16, device="cuda")
        assert F.scaled_dot_product_attention(q, q, q).shape == (8, 129, 64)

    assert events("90", program)[1:4] == [8, 8, 132096]


def test_small_known_tensors_are_served_too():
    assert events("90", lambda: F.scaled_dot_product_attention(*[torch.zeros(1, 1, 2, 8, device="cuda")] * 3))


@pytest.mark.parametrize("need_weights", [False, True])
def test_multihead_attention_without_gradients_projects_once(need_weights):
    def program() -> None:
        attention = nn.MultiheadAttention(96, 4, batch_first=True).to("cuda", torch.float16).eval()
        x = torch.empty(3, 65, 96, dtype=torch.float16, device="cuda")
        with torch.no_grad():
            attention(x, x, x, need_weights=need_weights)

    after_input = [n for n in events("90", program)[5:] if n > 0]
    fused = [112320, 8, 8, 37440, 37440] if RELEASE >= (2, 11) else [112320, 37440, 3120, *STATE, 37440]
    apart = [112320, 112320, 101400, 37440, 37440, 25350]
    assert after_input == (apart if need_weights else fused)


def test_padding_of_an_encoder_is_counted_and_said():
    recorder = Recorder(FakeTensorMode(allow_non_fake_inputs=True))
    with personality(recorder, find_device("h200")), recorder, torch.no_grad():
        encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(96, 4, 256, batch_first=True), 2).cuda().eval()
        mask = torch.zeros(3, 65, dtype=torch.bool, device="cuda")
        assert encoder(torch.empty(3, 65, 96, device="cuda"), src_key_padding_mask=mask).shape == (3, 65, 96)
    assert any("padding" in note for note in recorder.notes)
