"""Gradients of products: the way of tensors without zeros, as CUDA takes it for values that hold none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxmem import api
from fxmem.tape import Phase
from fxmem.workload import Mode


class Product(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.call = call

    def forward(self, x):
        return self.call(x * self.scale)


@pytest.mark.parametrize(
    ("call", "backward"),
    [
        (lambda x: x.prod(-1), ["unsqueeze", "unsqueeze", "eq", "sum", "sum", "div", "mul"]),
        (lambda x: x.prod(-1, keepdim=True), ["eq", "sum", "sum", "div", "mul"]),
        (lambda x: x.prod(), ["eq", "div", "mul"]),
        (lambda x: x.cumprod(-1), ["mul", "eq", "any", "flip", "cumsum", "flip", "div"]),
        (lambda x: x[:, :1].cumprod(-1), []),
    ],
)
def test_no_zero_is_looked_for_the_long_way(call, backward):
    """``prod_backward``, ``cumprod_backward`` (FunctionsManual.cpp); events equal on the phantom."""
    options = {"mode": Mode.TRAINING, "optimizer": "none", "steps": 1, "batch": 1 << 20}
    tape = api.trace(Product(call), lambda b: torch.zeros(b, 6), loss=lambda y: y.sum(), **options).tape
    backwards = [op.name.partition(".")[0] for op in tape.ops if op.phase is Phase.BACKWARD]
    names = [name for name in backwards if name != "detach"]
    first = names.index("expand") + 1
    assert names[first : first + len(backward)] == backward


def test_a_product_is_as_on_the_cpu():
    x = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    before = torch.autograd.grad(x.prod(1).sum() + x.cumprod(0).sum(), x)[0]
    api.trace(Product(lambda t: t.prod(-1)), lambda b: torch.zeros(b, 6), batch=1)
    after = torch.autograd.grad(x.prod(1).sum() + x.cumprod(0).sum(), x)[0]
    assert torch.equal(before, after), "the override ends with the trace"
