"""Matrix products: cuBLAS takes a workspace per handle and stream and keeps it.

The forward thread and the autograd engine's device thread have a handle each.
Sizes: ``getChosenWorkspaceSize`` in aten/src/ATen/cuda/CublasHandlePool.cpp (torch 2.14);
seen per architecture and torch version on the phantom device.
"""

from __future__ import annotations

from fxmem.kernels.steps import Out, Rule, Step, Take, Target, argument, contiguous, nbytes, numel
from fxmem.tape import Op, Role, TensorMeta

_DEFAULT_WORKSPACE = 4096 * 1024 * 2 + 16 * 1024 * 8
"""``:4096:2:16:8``: two chunks of 4096 KiB and eight of 16 KiB."""

_LARGE_WORKSPACE = 32 * 1024 * 1024
"""sm_90 (pytorch/pytorch#91564), and sm_100, sm_120 from torch 2.12 on (pytorch/pytorch#175344)."""

_LT_WORKSPACE = 1024 * 1024
"""cuBLASLt's own, before it shared cuBLAS's (pytorch/pytorch#73439)."""


def cublas_workspace(target: Target) -> Take:
    """The workspace of the calling thread's cuBLAS handle."""
    large = target.sm == 90 or (target.sm > 90 and target.torch_version >= (2, 12))
    return Take("cublas", _LARGE_WORKSPACE if large else _DEFAULT_WORKSPACE, Role.WORKSPACE, keep=True)


def _lt_workspaces(target: Target) -> list[Step]:
    """What a product through cuBLASLt asks for: its own workspace and that of the cuBLAS handle behind it.

    Up to torch 2.8 its own is taken for the call and before the handle's; then it is kept like the handle's
    and comes after (pytorch/pytorch#156495); from 2.12 on the handle's serves both (pytorch/pytorch#168175).
    """
    cublas = cublas_workspace(target)
    if target.torch_version < (2, 9):
        return [Take("cublaslt", _LT_WORKSPACE, Role.WORKSPACE), cublas]
    if target.torch_version < (2, 12):
        return [cublas, Take("cublaslt", _LT_WORKSPACE, Role.WORKSPACE, keep=True)]
    return [cublas]


def _takes_lt(op: Op) -> bool:
    """Whether cuBLASLt computes the product: ``useLtInterface`` of ``addmm_out_cuda_impl`` in Blas.cpp.

    It adds a bias of one dimension in the same kernel; a factor of one row or column it does not take.
    """
    if op.name == "_scaled_mm.default":
        return True
    if op.name not in ("addmm.default", "_addmm_activation.default"):
        return False
    bias, right = op.inputs[0], op.inputs[-1]
    return (
        len(bias.shape) == 1 and bias.shape[0] == right.shape[1] and contiguous(bias) and min(right.shape) > 1
        and argument(op, 3, "beta", 1) == 1 and not bias.dtype.startswith("complex")
    )  # fmt: skip


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
    return [Out(0), *copies, *(_lt_workspaces(target) if _takes_lt(op) else [cublas_workspace(target)])]


_MATRICES = frozenset(
    "mm.default addmm.default bmm.default baddbmm.default addmm_.default baddbmm_.default mm.out bmm.out addmm.out "
    "baddbmm.out".split()
)
_VECTORS = (
    "addbmm.default addmv.default mv.default dot.default vdot.default _int_mm.default _scaled_mm.default "
    "_addmm_activation.default"
).split()

GEMM: dict[str, Rule] = dict.fromkeys((*_MATRICES, *_VECTORS), _product)
