"""Workspaces of cuDNN's convolutions as PyTorch would allocate them, without a GPU. No torch."""

from __future__ import annotations

from fxmem.cudnn.question import Answer, Convolution, Direction, Source

__all__ = ["Answer", "Convolution", "Direction", "Source"]
