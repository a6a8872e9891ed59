"""Workspaces of cuDNN's convolutions as PyTorch would allocate them, without a GPU. No torch.

:func:`workspaces` makes the provider of a device; a :class:`Convolution` is asked, an :class:`Answer`
comes back. The answer is that of the installed cuDNN, which can plan for a device that is only
described to it (:mod:`fxmem.cudnn.planner`); without one, of a shipped table or a rule fitted to it.
"""

from __future__ import annotations

from fxmem.cudnn.provider import Workspaces, workspaces
from fxmem.cudnn.question import Answer, Convolution, Direction, Source

__all__ = ["Answer", "Convolution", "Direction", "Source", "Workspaces", "workspaces"]
