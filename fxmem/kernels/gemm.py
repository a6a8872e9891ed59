"""Matrix products: cuBLAS takes a workspace per handle and stream and keeps it.

The forward thread and the autograd engine's device thread have a handle each.
Sizes: ``getChosenWorkspaceSize`` in aten/src/ATen/cuda/CublasHandlePool.cpp (torch 2.14);
seen per architecture on the phantom device (docs/architecture.md, "Workspaces").
"""

from __future__ import annotations

from fxmem.kernels.steps import Out, Rule, Step, Take, Target
from fxmem.tape import Op, Role

_DEFAULT_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
"""``:4096:2:16:8``: two chunks of 4096 KiB and eight of 16 KiB."""

_LARGE_WORKSPACE = 32 * 1024 * 1024
"""sm_90 (pytorch/pytorch#91564) and sm_100, sm_120 (pytorch/pytorch#175344)."""


def cublas_workspace(target: Target) -> Take:
    """The workspace of the calling thread's cuBLAS handle."""
    large = target.sm >= 90
    return Take("cublas", _LARGE_WORKSPACE if large else _DEFAULT_WORKSPACE, Role.WORKSPACE, keep=True)


def _product(op: Op, target: Target) -> list[Step]:
    """The result is allocated before the handle is asked for."""
    return [Out(0), cublas_workspace(target)]


GEMM: dict[str, Rule] = dict.fromkeys(("mm.default", "addmm.default", "bmm.default", "baddbmm.default", "addbmm.default", "addmv.default", "mv.default", "dot.default", "vdot.default", "addmm_.default", "baddbmm_.default", "mm.out", "bmm.out", "addmm.out", "baddbmm.out", "_int_mm.default", "_scaled_mm.default", "_addmm_activation.default"), _product)  # fmt: skip
