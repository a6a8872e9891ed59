"""Which torch runs: some of its calls allocate otherwise from one release to the next."""

from __future__ import annotations

import torch

Release = tuple[int, int]

RELEASE: Release = (int(torch.__version__.split(".")[0]), int(torch.__version__.split(".")[1]))
"""Major and minor version."""
