"""Matrix products: cuBLAS takes a workspace per handle and stream and keeps it.

The forward thread and the autograd engine's device thread have a handle each.
Sizes: ``getChosenWorkspaceSize`` in aten/src/ATen/cuda/CublasHandlePool.cpp (torch 2.14);
seen per architecture on the phantom device (docs/architecture.md, "Workspaces").
"""

from __future__ import annotations

from fxmem.kernels.steps import Out, Rule, Step, Take, Target, contiguous, nbytes, numel
from fxmem.tape import Op, Role, TensorMeta

_DEFAULT_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
"""``:4096:2:16:8``: two chunks of 4096 KiB and eight of 16 KiB."""

_LARGE_WORKSPACE = 32 * 1024 * 1024
"""sm_90 (pytorch/pytorch#91564) and sm_100, sm_120 (pytorch/pytorch#175344)."""


def cublas_workspace(target: Target) -> Take:
    """The workspace of the calling thread's cuBLAS handle."""
    large = target.sm >= 90
    return Take("cublas", _LARGE_WORKSPACE if large else _DEFAULT_WORKSPACE, Role.WORKSPACE, keep=True)


def _readable(meta: TensorMeta) -> bool:
    """Whether cuBLAS can read a matrix (or each of a batch) where it lies: one dimension dense, no overlap.

    ``prepare_matrix_for_cublas`` and ``prepare_batch_matrix_for_cublas`` in aten/src/ATen/native/cuda/Blas.cpp.
    """
    (rows, columns), (down, along) = meta.shape[-2:], meta.stride[-2:]
    by_rows = along == 1 and down >= max(1, columns)
    by_columns = down == 1 and along >= max(1, rows)
    return by_rows or by_columns or (len(meta.shape) == 2 and contiguous(meta))


def _product(op: Op, target: Target) -> list[Step]:
    """The result is allocated, then copies of what cuBLAS cannot read, then the handle is asked for."""
    if any(numel(m) == 0 for m in op.inputs):
        return [Out(0)]  # nothing to multiply: cuBLAS is not called
    factors = [m for m in op.inputs if len(m.shape) >= 2][-2:] if op.name in _MATRICES else []
    copies = [Take(f"factor {i}", nbytes(m)) for i, m in enumerate(factors) if not _readable(m)]
    return [Out(0), *copies, cublas_workspace(target)]


_MATRICES = frozenset(
    "mm.default addmm.default bmm.default baddbmm.default addmm_.default baddbmm_.default mm.out bmm.out addmm.out "
    "baddbmm.out".split()
)
_VECTORS = (
    "addbmm.default addmv.default mv.default dot.default vdot.default _int_mm.default _scaled_mm.default "
    "_addmm_activation.default"
).split()

GEMM: dict[str, Rule] = dict.fromkeys((*_MATRICES, *_VECTORS), _product)
