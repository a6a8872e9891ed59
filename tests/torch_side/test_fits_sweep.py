"""Twenty programs of several families: the answer is proved by traces of its own batch and of the next."""

from __future__ import annotations

from pathlib import Path

import pytest

import fxmem
from fxmem import api
from fxmem.allocator import AllocatorConfig, replay
from fxmem.workload import ConvWorkspace, Mode

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "model.py")
SMALL_LLAMA = (("num_hidden_layers", 4), ("hidden_size", 512), ("intermediate_size", 1376))
INFER: dict[str, object] = {"mode": Mode.INFERENCE}
TRAIN: dict[str, object] = {"mode": Mode.TRAINING}

QUICK = [
    (EXAMPLE, "1GiB", TRAIN),
    ("torchvision:resnet18", "t4", TRAIN | {"optimizer": "sgd-momentum"}),
    ("timm:vit_tiny_patch16_224", "24GiB", TRAIN | {"amp": "bfloat16"}),
    ("hf:distilbert", "a6000", INFER | {"seq": 256}),
]
SWEEP = [
    (EXAMPLE, "512MiB", INFER),
    ("torchvision:resnet50", "a100-80gb", INFER | {"dtype": "float16"}),
    ("torchvision:mobilenet_v3_small", "rtx-4090", TRAIN),
    ("torchvision:vgg11", "t4", INFER),
    ("torchvision:densenet121", "a6000", TRAIN | {"checkpoint": True}),
    ("torchvision:swin_t", "24GiB", INFER),
    ("torchvision:convnext_tiny", "h200", TRAIN | {"amp": "bfloat16", "channels_last": True}),
    ("timm:efficientnet_b0", "t4", TRAIN | {"amp": "float16"}),
    ("timm:mixer_s16_224", "rtx-4090", TRAIN | {"clip": True}),
    ("timm:convnext_atto", "16GiB", INFER),
    ("hf:gpt2", "h100", TRAIN | {"seq": 512, "amp": "bfloat16"}),
    ("hf:bert", "t4", TRAIN | {"seq": 128, "optimizer": "sgd", "attn": "eager"}),
    ("hf:llama", "a6000", TRAIN | {"seq": 512, "model_args": SMALL_LLAMA, "accumulate": 2}),
    ("hf:t5", "24GiB", TRAIN | {"seq": 128}),
    ("hf:roberta", "b200", INFER | {"seq": 512, "dtype": "bfloat16"}),
    ("hf:gpt2", "t4", {"mode": Mode.GENERATION, "prompt": 32, "new_tokens": 4}),
]
MARKED = [*QUICK, *(pytest.param(*case, marks=[pytest.mark.sweep, pytest.mark.slow]) for case in SWEEP)]


def ids(value: object) -> str | None:
    return Path(value).name if isinstance(value, str) else str(value["mode"]) if isinstance(value, dict) else None


@pytest.mark.parametrize(("target", "device", "options"), MARKED, ids=ids)
def test_the_answer_fits_and_the_next_does_not(target, device, options, monkeypatch):
    family = target.partition(":")[0]
    pytest.importorskip({"hf": "transformers"}.get(family, family) if target != EXAMPLE else "torch")
    traces: list[int] = []
    record = api.record
    monkeypatch.setattr(api, "record", lambda *args: traces.append(args[-1]) or record(*args))
    options = {"conv_workspace": ConvWorkspace.NONE, **options}
    answer = fxmem.max_batch(target, device=device, safety=0.8, **options).best.answer
    assert (answer.proved, answer.batch > 0, len(traces) <= 3) == (True, True, True), (answer, traces)
    assert answer.next is not None
    for batch, fits in ((answer.batch, True), (answer.next.batch, False)):
        tape = fxmem.trace(target, device=device, batch=batch, **options).tape
        assert (replay(tape, AllocatorConfig(), answer.allocator_bytes).oom is None) is fits
