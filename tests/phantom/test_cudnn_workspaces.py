"""The planned workspaces against those that PyTorch asks for on the phantom device.

Needs a CUDA build of torch, gcc and the phantom (calibration/phantom/README.md). PHANTOM_BUILD names the
folder of a built phantom; it is built into a temporary one otherwise.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from sweeping import first_of

from fxmem.cudnn.process import find_library

pytestmark = [pytest.mark.phantom, pytest.mark.slow]

PHANTOM = Path(__file__).parents[2] / "calibration" / "phantom"
CLASSES = {"forward": 0, "dgrad": 1, "wgrad": 2}
MODES = {
    "fp32": ({}, ["--dtype", "fp32"]),
    "fp16": ({"dtype": "float16"}, ["--dtype", "fp16"]),
    "channels-last": ({"channels_last": True}, ["--channels-last"]),
    "amp-channels-last": ({"amp": "float16", "channels_last": True}, ["--dtype", "amp-fp16", "--channels-last"]),
}


@pytest.fixture(scope="module")
def phantom(python, tmp_path_factory):
    # fxmem plans with the cuDNN beside this python; without one there is nothing to compare.
    if find_library() is None:
        assert torch.version.cuda is None, "a CUDA build of torch comes with cuDNN"
        pytest.skip("no cuDNN beside this python")
    build = os.environ.get("PHANTOM_BUILD") or str(tmp_path_factory.mktemp("phantom"))
    environment = {**os.environ, "PHANTOM_PYTHON": python, "PHANTOM_BUILD": build}
    if not Path(build, "libphantom.so").exists():
        built = subprocess.run(
            ["sh", PHANTOM / "build.sh"], env=environment, capture_output=True, text=True, check=False
        )
        assert built.returncode == 0, f"the phantom does not build: {built.stderr[-300:]}"
    return environment


def run(phantom, sm, *arguments, **extra):
    environment = {**phantom, "PHANTOM_CUDNN": "real", "PHANTOM_SM": str(sm), **extra}
    return subprocess.run(
        ["sh", PHANTOM / "phantom_run", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )


@pytest.mark.parametrize("sm", first_of([90, 80]))
@pytest.mark.parametrize("mode", first_of(list(MODES), 2))
@pytest.mark.parametrize("model", first_of(["resnet50", "efficientnet_b0", "convnext_tiny", "vgg16"], 2))
def test_training(phantom, model, mode, sm):
    pytest.importorskip("torchvision")
    from fxmem.api import trace
    from fxmem.cudnn import Source, workspaces
    from fxmem.kernels.conv_workspace import tape_questions
    from fxmem.kernels.steps import Target
    from fxmem.workload import Mode

    options, arguments = MODES[mode]
    measured = run(
        phantom, sm, PHANTOM / "measure.py", "--model", f"torchvision:{model}", "--mode", "train", "--batch", "8",
        "--optimizer", "sgd", "--steps", "1", "--keep-outputs", *arguments, PHANTOM_VERBOSE="1",
    )  # fmt: skip
    expected = [(int(k), int(n)) for k, n in re.findall(r"plan class (\d) workspace (\d+)", measured.stderr)]
    assert expected

    tape = trace(f"torchvision:{model}", batch=8, steps=1, mode=Mode.TRAINING, optimizer="sgd", **options).tape
    questions = tape_questions([tape], Target(sm=sm, sm_count=132 if sm == 90 else 108))
    ask = workspaces(f"sm_{sm}", keep=False)
    ask.prepare(questions)
    assert ask.reason == ""
    assert {ask(q).source for q in questions} == {Source.CUDNN}
    assert [(CLASSES[q.direction], ask(q).nbytes) for q in questions] == expected


SELECT = """
import itertools, torch
batches, channels, heights = (1, 2, 8, 32), (16, 64, 128, 256, 512), (1, 4, 7, 14, 28, 56)
for half, b, c, h, k, s in itertools.product((0, 1), batches, channels, heights, (1, 3, 5, 7), (1, 2)):
    if h + k // 2 * 2 < k:
        continue
    dtype = torch.float16 if half else torch.bfloat16
    x, w = torch.empty(b, c, h, h, device="cuda", dtype=dtype), torch.empty(c, 1, k, k, device="cuda", dtype=dtype)
    found = torch._C._select_conv_backend(x, w, None, [s, s], [k // 2] * 2, [1, 1], False, [0, 0], c)
    print(half, b, c, h, k, s, int(str(found).endswith("Cudnn")))
"""


@pytest.mark.parametrize("sm", first_of([80, 120]))
def test_depthwise_choice(phantom, sm):
    from fxmem.kernels.conv_workspace import questions
    from fxmem.kernels.steps import Target
    from fxmem.tape import Op, Phase, Ref, TensorMeta

    lines = run(phantom, sm, "-c", SELECT, PHANTOM_CUDNN="stub").stdout.splitlines()
    assert len(lines) > 1500
    for line in lines:
        half, b, c, h, k, s, expected = map(int, line.split())
        dtype = "float16" if half else "bfloat16"
        out = (h + k // 2 * 2 - k) // s + 1
        op = Op(
            name="convolution.default", step=1, phase=Phase.FORWARD, module="", source="", start=0, stop=0,
            inputs=(
                TensorMeta(0, (b, c, h, h), (c * h * h, h * h, h, 1), dtype),
                TensorMeta(1, (c, 1, k, k), (k * k, k * k, k, 1), dtype),
            ),
            outputs=(TensorMeta(2, (b, c, out, out), (c * out * out, out * out, out, 1), dtype),),
            args=(Ref(0), Ref(1), None, (s, s), (k // 2, k // 2), (1, 1), False, (0, 0), c),
        )  # fmt: skip
        assert bool(questions(op, Target(sm=sm, sm_count=1))) is bool(expected), line
