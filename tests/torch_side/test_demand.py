"""The demand of real programs against their whole tapes: all rules, convolutions' workspaces, several steps."""

from __future__ import annotations

import pytest

import fxmem
from fxmem import api
from fxmem.kernels import expand
from fxmem.steady import extend
from fxmem.workload import ConvWorkspace, Mode

CASES = [
    ("torchvision:resnet18", "t4", {"optimizer": "sgd-momentum", "amp": "float16"}),
    ("timm:vit_tiny_patch16_224", "h100", {"amp": "bfloat16", "clip": True}),
    ("hf:gpt2", "a100-80gb", {"seq": 256, "model_args": (("n_layer", 2),)}),
    ("hf:distilbert", "rtx-4090", {"seq": 64, "mode": Mode.INFERENCE}),
]


@pytest.mark.parametrize(("target", "device", "options"), CASES, ids=[case[0] for case in CASES])
def test_it_is_the_demand_of_the_whole_tape(target, device, options):
    pytest.importorskip({"hf": "transformers"}.get(target.partition(":")[0], target.partition(":")[0]))
    workload = fxmem.Workload(**{"mode": Mode.TRAINING, "conv_workspace": ConvWorkspace.NONE, **options})
    run = api._Run(target, workload, fxmem.find_device(device), inputs=None, loss=None)
    program, _ = api._along_batch(run)
    assert program.law.exact
    for batch in (2, 5, 64, 1024, 3000):
        tape = extend(program.law.at(batch), workload.step_count)
        assert tape is not None
        whole = expand(tape, run.target)
        assert program.demand(batch) == whole.demand
        assert program.at(batch) == whole
