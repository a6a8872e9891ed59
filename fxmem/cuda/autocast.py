"""Autocast as CUDA has it, on the CPU's autocast key.

CUDA casts other operators than the CPU does. Each operator of either device's lists gets a
kernel that follows CUDA's: lower precision, float32, float32 unless a dtype is given, widest
input type, or none. Casts of float32 leaves (weights) are kept until the outermost autocast
region ends, as ``cached_cast`` in aten/src/ATen/autocast_mode.cpp does.
Lists: ``AT_FORALL_*`` in aten/src/ATen/autocast_mode.h (torch 2.14).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

LOWER = (
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm "
    "baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell "
    "rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention"
).split()
FLOAT32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d "
    "_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d "
    "upsample_bicubic2d _upsample_bicubic2d_aa"
).split()
FLOAT32_UNLESS_GIVEN = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList"
).split()
PROMOTE = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add".split()
APPEND_DTYPE = "norm.Scalar norm.ScalarOpt_dim".split()
BANNED = "binary_cross_entropy".split()
CPU_ONLY = (
    "cat stack index_copy avg_pool3d "
    "binary_cross_entropy grid_sampler polar prod quantile quantile.scalar nanquantile nanquantile.scalar "
    "stft stft.center cdist grid_sampler_2d grid_sampler_3d trace view_as_complex cholesky cholesky_inverse "
    "cholesky_solve inverse lu_solve orgqr ormqr pinverse max_pool3d max_unpool2d max_unpool3d adaptive_avg_pool3d "
    "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d mse_loss "
    "cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss poisson_nll_loss smooth_l1_loss "
    "cross_entropy_loss l1_loss huber_loss margin_ranking_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "ctc_loss.IntList ctc_loss.Tensor kl_div multilabel_margin_loss binary_cross_entropy_with_logits fft_fft fft_ifft "
    "fft_fft2 fft_ifft2 fft_fftn fft_ifftn fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft "
    "fft_ihfft linalg_cond linalg_cond.p_str linalg_matrix_rank linalg_matrix_rank.tol_tensor "
    "linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.atol_rtol_float linalg_solve linalg_cholesky "
    "linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv linalg_householder_product linalg_tensorinv "
    "linalg_tensorsolve fake_quantize_per_tensor_affine geqrf _lu_with_info qr svd triangular_solve "
    "fractional_max_pool2d fractional_max_pool3d adaptive_max_pool3d multilabel_margin_loss_forward linalg_qr "
    "linalg_cholesky_ex linalg_svd linalg_eig linalg_eigh linalg_lstsq linalg_inv_ex"
).split()
"""What only the CPU's lists name: no cast on CUDA. The four RNNs are there too; :mod:`fxmem.cuda.rnn` has their
kernels, and torch before 2.9 takes one Python kernel for an operator and key, never a second in its place."""

_EXCLUDED = torch._C.DispatchKey.AutocastCPU
Cast = Callable[[torch.Tensor], torch.Tensor]


class Autocast:
    """The kernels and the cache of weight casts, for one scope.

    Args:
        on_device: Whether a tensor is on the device; others are not cast.
        overrides: Operators, by name, that the personality runs otherwise than the CPU does.
    """

    def __init__(self, on_device: Callable[[torch.Tensor], bool], overrides: Mapping[str, Callable[..., Any]]) -> None:
        self.on_device = on_device
        self.overrides = overrides
        self._cache: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def clear(self) -> None:
        """``torch.clear_autocast_cache()``."""
        self._cache.clear()

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """Operator name to kernel for the CPU's autocast key."""
        table: dict[str, Callable[..., Any]] = {}
        for names, make in (
            (CPU_ONLY, self._unchanged), (LOWER, self._lower), (FLOAT32, self._float32),
            (FLOAT32_UNLESS_GIVEN, self._float32_unless_given), (PROMOTE, self._promote),
            (APPEND_DTYPE, self._append_dtype), (BANNED, self._banned),
        ):  # fmt: skip
            for name in names:
                op = _overload(name)
                if op is not None:
                    table[name] = make(op)
        return table

    # ------------------------------------------------------------- policies
    def _unchanged(self, op: Any) -> Callable[..., Any]:
        """No policy: a composite operator's parts still meet theirs."""
        own = self.overrides.get(op.name().removeprefix("aten::"))
        if own is not None:
            return own
        if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
            decomposed: Callable[..., Any] = op.decompose
            return decomposed

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED_SET):
                return op(*args, **kwargs)

        return call

    def _casting(self, op: Any, dtype: Callable[[], torch.dtype]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            wanted = dtype()
            with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED_SET):
                args, kwargs = self._mapped((args, kwargs), lambda t: self.cast(t, wanted))
                return op(*args, **kwargs)

        return call

    def _lower(self, op: Any) -> Callable[..., Any]:
        return self._casting(op, lambda: torch.get_autocast_dtype("cpu"))

    def _float32(self, op: Any) -> Callable[..., Any]:
        return self._casting(op, lambda: torch.float32)

    def _float32_unless_given(self, op: Any) -> Callable[..., Any]:
        """``fp32_set_opt_dtype``: the operator itself computes in float32, no copy is made."""
        position = next(i for i, a in enumerate(op._schema.arguments) if a.name == "dtype")
        keyword = op._schema.arguments[position].kwarg_only

        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED_SET):
                given = kwargs.get("dtype") if keyword or len(args) <= position else args[position]
                first = args[0]
                if given is None and self._eligible(first):
                    args = args[:position]
                    kwargs = {**kwargs, "dtype": torch.float32}
                return op(*args, **kwargs)

        return call

    def _append_dtype(self, op: Any) -> Callable[..., Any]:
        name = "ScalarOpt_dtype" if op._overloadname == "Scalar" else "ScalarOpt_dim_dtype"
        wide = getattr(torch.ops.aten.norm, name)

        def call(x: torch.Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED_SET):
                if not self._eligible(x):
                    return op(x, p) if dim is None else op(x, p, dim, keepdim)
                if dim is None:
                    return wide(x, p, dtype=torch.float32)
                return wide(x, p, dim, keepdim, dtype=torch.float32)

        return call

    def _promote(self, op: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_EXCLUDED_SET):
                tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
                eligible = [t for t in tensors if self._eligible(t)]
                if any(t.dtype is torch.float32 for t in eligible):
                    args, kwargs = self._mapped((args, kwargs), lambda t: self.cast(t, torch.float32))
                return op(*args, **kwargs)

        return call

    def _banned(self, op: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(
                "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast; "
                "use binary_cross_entropy_with_logits"
            )

        return call

    # ------------------------------------------------------------- casts
    def _eligible(self, t: object) -> bool:
        return (
            isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype is not torch.float64 and self.on_device(t)
        )

    @staticmethod
    def _mapped(tree: Any, cast: Cast) -> Any:
        """Cast the tensors from the last argument to the first, as compiled C++ evaluates arguments."""
        leaves, shape = pytree.tree_flatten(tree)
        done = [cast(x) if isinstance(x, torch.Tensor) else x for x in reversed(leaves)]
        return pytree.tree_unflatten(done[::-1], shape)

    def cast(self, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``cached_cast``."""
        if t.dtype is dtype or not self._eligible(t):
            return t
        lower = dtype is torch.get_autocast_dtype("cpu")
        cached = (
            lower and t.dtype is torch.float32 and t.requires_grad and t.is_leaf and not t._is_view()
            and torch.is_autocast_cache_enabled()
        )  # fmt: skip
        if not cached:
            return t.to(dtype)
        entry = self._cache.get(id(t))
        if entry is not None and entry[0]() is t:
            return entry[1]
        with torch.enable_grad():  # a cast made without gradients must serve a later pass with them
            made = t.to(dtype)
        self._cache[id(t)] = (weakref.ref(t), made)
        return made


_EXCLUDED_SET = torch._C.DispatchKeySet(_EXCLUDED)


def _overload(name: str) -> Any:
    """The overload called ``name``, or ``None`` where this torch has no such operator."""
    packet, _, overload = name.partition(".")
    found = getattr(torch.ops.aten, packet, None)
    return getattr(found, overload or "default", None) if found is not None else None


@contextlib.contextmanager
def cuda_autocast(
    on_device: Callable[[torch.Tensor], bool], library: torch.library.Library,
    overrides: Mapping[str, Callable[..., Any]],
) -> Iterator[Autocast]:  # fmt: skip
    """Register CUDA's autocast kernels in ``library`` and clear the cache where torch would."""
    autocast = Autocast(on_device, overrides)
    for name, kernel in autocast.kernels().items():
        library.impl(name, kernel, "AutocastCPU")
    original = torch.clear_autocast_cache

    def clear() -> None:
        autocast.clear()
        original()

    torch.clear_autocast_cache = clear
    try:
        yield autocast
    finally:
        torch.clear_autocast_cache = original
        autocast.clear()
