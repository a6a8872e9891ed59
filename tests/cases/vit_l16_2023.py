"""ViT-L/16 as torch 2.1.0.dev20230623 ran it in rasbt/pytorch-memory-optim (logs.md there: five reserved figures).

Two things that PyTorch did then and does not do today: attention in half precision gave its output in another
layout than its inputs', so that every layer copied it before the output projection (``Attention``), and Adam made its
denominator out of place (``Adam``; until pytorch/pytorch#104898). The script zeroed gradients just before the
backward pass: ``--zero-grad before-backward``.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.MultiheadAttention):
    """Self-attention without weights, batch first; ends in a copy of the heads' output."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **_: object) -> tuple[Tensor, None]:
        x = query.transpose(1, 0)
        tokens, batch, width = x.shape
        packed = functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        packed = packed.unflatten(-1, (3, width)).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous()
        q, k, v = (
            part.view(tokens, batch * self.num_heads, self.head_dim).transpose(0, 1)
            .view(batch, self.num_heads, tokens, self.head_dim)
            for part in packed
        )  # fmt: skip
        heads = functional.scaled_dot_product_attention(q, k, v)
        copied = heads.permute(2, 0, 1, 3).clone(memory_format=torch.contiguous_format)
        out = functional.linear(copied.view(batch * tokens, width), self.out_proj.weight, self.out_proj.bias)
        return out.view(tokens, batch, width).transpose(1, 0), None


class Adam(torch.optim.Optimizer):
    """Tensor lists as ``torch.optim.Adam(foreach=True)``, with the denominator in memory of its own."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p] = {"step": torch.tensor(0.0, device="cpu"), "exp_avg": torch.zeros_like(p),
                                 "exp_avg_sq": torch.zeros_like(p)}  # fmt: skip
        grads = [p.grad for p in params]
        averages, squares = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(averages, grads, 0.1)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, grads, grads, 0.001)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [1.0] * len(roots))
        denominators = torch._foreach_add(roots, 1e-8)
        torch._foreach_addcdiv_(params, averages, denominators, [-1e-3] * len(params))


def model() -> nn.Module:
    from torchvision.models import vit_l_16

    net = vit_l_16(weights=None)
    net.heads.head = nn.Linear(1024, 10)
    for block in net.encoder.layers:
        block.self_attention = Attention(1024, 16, batch_first=True)
    return net


def inputs(batch: int) -> Tensor:
    return torch.zeros(batch, 3, 224, 224)


def loss(output: Tensor) -> Tensor:
    return functional.cross_entropy(output, torch.zeros(len(output), dtype=torch.long, device=output.device))
