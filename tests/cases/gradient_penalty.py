"""A critic with a gradient penalty: the gradient of a gradient, through convolutions."""

from __future__ import annotations

import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(128 * 16 * 16, 1),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images.detach().requires_grad_()
        scores = self.net(images)
        (slope,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
        return scores.mean() + 10 * ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


def model() -> nn.Module:
    return Critic()


def inputs(batch: int) -> torch.Tensor:
    return torch.zeros(batch, 3, 64, 64)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output
