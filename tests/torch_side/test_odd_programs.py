"""Programs that leave the usual path: gradients inside a forward pass, saved tensors on the host."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from fxmem import api
from fxmem.tape import Phase, Role, Tape
from fxmem.workload import Mode

TRAINING = {"mode": Mode.TRAINING, "optimizer": "none", "steps": 1, "batch": 4}


def traced(module, shape=(8,), **options) -> Tape:
    return api.trace(module, lambda b: torch.zeros(b, *shape), **options).tape


def test_a_gradient_taken_in_a_forward_pass_is_made_by_the_engines_thread():
    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(self.inner(x).sum(), x)[0]

    tape = traced(Forces(), batch=4, steps=1)
    products = [op for op in tape.ops if op.name in ("addmm.default", "mm.default")]
    assert [(op.phase, op.thread) for op in products] == [(Phase.FORWARD, "main"), (Phase.FORWARD, "autograd")]
    workspaces = [s for s in tape.storages if s.role is Role.WORKSPACE]
    assert len(workspaces) == 2, "each thread has a handle of cuBLAS of its own"


@pytest.mark.parametrize("pin_memory", [False, True])
def test_tensors_saved_on_the_host_leave_the_device_until_the_backward_pass(pin_memory):
    class Offloading(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x):
            with save_on_cpu(pin_memory=pin_memory):
                return self.inner(x).sin()

    tape = traced(Offloading(), **TRAINING)
    (product,) = (op for op in tape.ops if op.name == "addmm.default")
    (cosine,) = (op for op in tape.ops if op.name == "cos.default")
    assert tape.events.index(~product.outputs[0].storage) < cosine.start
    back = cosine.inputs[0].storage
    assert back not in (-1, product.outputs[0].storage)
    assert tape.ops[tape.storages[back].op].phase is Phase.BACKWARD
