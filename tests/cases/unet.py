"""The classic U-Net: five levels from 64 to 1024 channels, transposed convolutions on the way up; 31.04 M parameters.

Ronneberger, Fischer and Brox 2015, with the padded convolutions and batch norms that today's versions have,
for segmentation into two classes.

    fxmem batch tests/cases/unet.py --mode training --device 24GiB --image 4096
    fxmem batch tests/cases/unet.py --mode training --device 24GiB --vary image=256..4096
"""

import torch
from torch import nn

WIDTHS = (64, 128, 256, 512, 1024)


class Double(nn.Sequential):
    """Two convolutions, each with a batch norm and a ReLU."""

    def __init__(self, width: int, to: int) -> None:
        super().__init__(
            nn.Conv2d(width, to, 3, padding=1, bias=False), nn.BatchNorm2d(to), nn.ReLU(inplace=True),
            nn.Conv2d(to, to, 3, padding=1, bias=False), nn.BatchNorm2d(to), nn.ReLU(inplace=True),
        )  # fmt: skip


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Double(a, b) for a, b in zip((3, *WIDTHS), WIDTHS, strict=False))
        self.pool = nn.MaxPool2d(2)
        pairs = list(zip(WIDTHS[:0:-1], WIDTHS[-2::-1], strict=True))
        self.wider = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(Double(a, b) for a, b in pairs)
        self.head = nn.Conv2d(WIDTHS[0], 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for level in self.down[:-1]:
            x = level(x)
            kept.append(x)
            x = self.pool(x)
        x = self.down[-1](x)
        for wider, level in zip(self.wider, self.up, strict=True):
            x = level(torch.cat([kept.pop(), wider(x)], dim=1))
        return self.head(x)


def model() -> nn.Module:
    return UNet()


def inputs(batch: int, image: int = 512) -> torch.Tensor:
    return torch.zeros(batch, 3, image, image)
