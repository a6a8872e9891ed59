"""A small image model: a convolutional stem, then transformer blocks, then a classifier.

    fxmem estimate examples/model.py --mode training --batch 64 --device t4

fxmem finds ``model``, and where they are given ``inputs`` and ``loss``.
"""

import torch
from torch import nn

CLASSES = 1000
CHANNELS = 384


def downsample(width: int, to: int) -> nn.Module:
    conv = nn.Conv2d(width, to, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(to), nn.ReLU(inplace=True))


class Stem(nn.Sequential):
    """Three convolutions with stride 2: an image of 224 x 224 becomes 28 x 28 tokens."""

    def __init__(self) -> None:
        widths = (3, CHANNELS // 4, CHANNELS // 2, CHANNELS)
        super().__init__(*(downsample(widths[i], widths[i + 1]) for i in range(3)))


class Block(nn.Module):
    """Attention and a feed-forward layer, each with a residual path."""

    def __init__(self, heads: int = 6, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.qkv, self.project = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.feed = nn.Sequential(
            nn.Linear(CHANNELS, 4 * CHANNELS), nn.GELU(), nn.Linear(4 * CHANNELS, CHANNELS), nn.Dropout(dropout)
        )

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.project(mixed.transpose(1, 2).reshape(batch, tokens, CHANNELS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Classifier(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.stem = Stem()
        self.position = nn.Parameter(torch.zeros(1, 28 * 28, CHANNELS))
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.head = nn.Linear(CHANNELS, CLASSES)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(image).flatten(2).transpose(1, 2) + self.position
        return self.head(self.blocks(tokens).mean(dim=1))


def model(depth: int = 6) -> nn.Module:
    """``--model-arg depth=12`` sets the argument."""
    return Classifier(depth)


def inputs(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 224, 224)


def loss(output: torch.Tensor) -> torch.Tensor:
    target = torch.zeros(len(output), dtype=torch.long, device=output.device)
    return nn.functional.cross_entropy(output, target, label_smoothing=0.1)
