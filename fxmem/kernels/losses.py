"""Losses: the unreduced loss and its mean inside one operator.

aten/src/ATen/native/Loss.cpp, aten/src/ATen/native/cuda/Loss.cu and NLLLoss2d.cu (torch 2.14). The results of
``mse_loss``, ``smooth_l1_loss``, ``binary_cross_entropy`` and ``soft_margin_loss`` keep the memory of the
unreduced loss (:mod:`fxmem.recording.shapes.loss` says so to the trace).
"""

from __future__ import annotations

import math

from fxmem.kernels.reductions import device_tensor, reduce_steps, row_major, summing
from fxmem.kernels.steps import (
    Drop,
    Out,
    Rule,
    Step,
    Take,
    Target,
    argument,
    contiguous,
    itemsize,
    nbytes,
    numel,
    tensor,
)
from fxmem.tape import Op, TensorMeta

_NONE = 0

_FEW = 450
"""``is_large`` in ``ctc_loss_backward_gpu_template``."""


def _loss(op: Op) -> TensorMeta | None:
    """The unreduced loss; dense, so its order of dimensions does not matter to a full reduction."""
    first, second = device_tensor(op, 0), tensor(op, 1)
    if first is None or second is None:
        return None
    shape = first.shape
    if second.shape != shape:
        rank = max(len(shape), len(second.shape))
        padded = [(1,) * (rank - len(s)) + tuple(s) for s in (shape, second.shape)]
        shape = tuple(b if a == 1 else a for a, b in zip(*padded, strict=True))
    return TensorMeta(-1, shape, row_major(shape), op.outputs[0].dtype)


def _mean(loss: TensorMeta, target: Target) -> list[Step]:
    """``mean`` or ``sum`` of the unreduced loss into a scalar that exists."""
    scalar = TensorMeta(-1, (), (), loss.dtype)
    return reduce_steps(loss, (scalar,), (), summing, target)


def _structured(op: Op, target: Target) -> list[Step] | None:
    """``mse_loss_out``, ``smooth_l1_loss_out`` (Loss.cpp): a second iterator allocates the loss once more."""
    loss = _loss(op)
    if loss is None or argument(op, 2, "reduction", 1) == _NONE:
        return None
    return [Out(0), Take("loss", nbytes(loss)), *_mean(loss, target), Drop("loss")]


def _huber(op: Op, target: Target) -> list[Step] | None:
    """``huber_loss`` (Loss.cpp): the loss, then its mean."""
    loss = _loss(op)
    if loss is None or argument(op, 2, "reduction", 1) == _NONE:
        return None
    return [Take("loss", nbytes(loss)), Out(0), *_mean(loss, target), Drop("loss")]


def _resized(op: Op, target: Target, reduction: int) -> list[Step] | None:
    loss = _loss(op)
    if loss is None or argument(op, reduction, "reduction", 1) == _NONE:
        return None
    return [Out(0), Take("mean", itemsize(loss.dtype)), *_mean(loss, target), Drop("mean")]


def _binary_cross_entropy(op: Op, target: Target) -> list[Step] | None:
    """``binary_cross_entropy_out_cuda`` (cuda/Loss.cu): the mean is copied into the resized loss."""
    return _resized(op, target, 3)


def _soft_margin(op: Op, target: Target) -> list[Step] | None:
    """``soft_margin_loss_out`` (Loss.cpp): likewise."""
    return _resized(op, target, 2)


def _soft_margin_backward(op: Op, target: Target) -> list[Step] | None:
    """``soft_margin_loss_backward_out`` (Loss.cpp): ``exp(-target * input)`` in three tensors."""
    x, y = device_tensor(op, 1), tensor(op, 2)
    if x is None or y is None:
        return None
    size = max(nbytes(x), nbytes(y))
    return [
        Take("negative", nbytes(y)), Take("product", size), Take("exponential", size),
        Drop("product"), Drop("negative"), Out(0), Drop("exponential"),
    ]  # fmt: skip


def _with_logits(op: Op, target: Target) -> list[Step] | None:
    """``binary_cross_entropy_with_logits`` (Loss.cpp): log-sigmoid, positive weights, then the loss in place."""
    x, y, positive = tensor(op, 0), tensor(op, 1), tensor(op, 3)
    loss = _loss(op)
    if x is None or y is None or loss is None:
        return None
    steps: list[Step] = [Take("log sigmoid", nbytes(x))]
    if positive is not None:
        product = math.prod(loss.shape) * itemsize(loss.dtype)
        steps += [
            Take("positive", nbytes(positive)), Take("log weight", product), Drop("positive"), Drop("log weight"),
        ]  # fmt: skip
    if argument(op, 4, "reduction", 1) == _NONE:
        return [*steps, Out(0), Drop("log sigmoid")]
    return [*steps, Take("loss", nbytes(y)), Out(0), *_mean(loss, target), Drop("loss"), Drop("log sigmoid")]


def _copies(*sources: TensorMeta | None) -> tuple[list[Step], list[Step]]:
    """``contiguous()`` copies, and their ends."""
    wanted = [(f"contiguous {i}", s) for i, s in enumerate(sources) if s is not None and not contiguous(s)]
    return [Take(key, nbytes(s)) for key, s in wanted], [Drop(key) for key, _ in reversed(wanted)]


def _nll(op: Op, target: Target) -> list[Step] | None:
    """``nll_loss_forward_out_cuda_template`` (cuda/Loss.cu): operands are made dense."""
    if device_tensor(op, 0) is None:
        return None
    takes, drops = _copies(tensor(op, 0), tensor(op, 1), tensor(op, 2))
    return [Out(0), Out(1), *takes, *drops]


def _nll_backward(op: Op, target: Target) -> list[Step] | None:
    """``nll_loss_backward_out_cuda_template`` (cuda/Loss.cu)."""
    if device_tensor(op, 0) is None:
        return None
    takes, drops = _copies(tensor(op, 2), tensor(op, 3))
    return [Out(0), *takes, *drops]


def _nll2d(op: Op, target: Target) -> list[Step] | None:
    """``nll_loss2d_forward_out_cuda_template`` (cuda/NLLLoss2d.cu): the total weight comes first."""
    x, y, weight = device_tensor(op, 0), tensor(op, 1), tensor(op, 2)
    if x is None or y is None or not numel(y):
        return None
    none = argument(op, 3, "reduction", 1) == _NONE
    takes, drops = _copies(weight) if none else _copies(x, weight, y)
    return [Out(1), Out(0), *takes, *drops]


def _nll2d_backward(op: Op, target: Target) -> list[Step] | None:
    """``nll_loss2d_backward_out_cuda_template`` (cuda/NLLLoss2d.cu)."""
    if device_tensor(op, 0) is None:
        return None
    none = argument(op, 4, "reduction", 1) == _NONE
    takes, drops = _copies(tensor(op, 3)) if none else _copies(tensor(op, 2), tensor(op, 3))
    return [Out(0), *takes, *drops]


def _ctc(op: Op, target: Target) -> list[Step]:
    """``ctc_loss_gpu_template`` in aten/src/ATen/native/cuda/LossCTC.cu: lengths and offsets go to the device first."""
    return [*_ctc_tables(op.outputs[0].shape[0]), Out(1), Out(0)]


def _ctc_backward(op: Op, target: Target) -> list[Step] | None:
    """``ctc_loss_backward_gpu_template`` there: ``log_beta`` is as large as ``log_alpha``.

    Of many steps or labels the blanks are summed by ``logsumexp`` of every second column.
    """
    log_probs, alpha = tensor(op, 1), tensor(op, 6)
    if log_probs is None or alpha is None:
        return None
    length, batch, labels = log_probs.shape
    steps: list[Step] = [*_ctc_tables(batch), Take("beta", nbytes(alpha))]
    if 2 * length + 24 * batch // 10 + 2 * labels // 10 <= _FEW:
        return [*steps, Out(0)]
    item = itemsize(alpha.dtype)
    row = batch * length * item
    blanks = row * (alpha.shape[2] // 2 + 1)
    sums: list[Step] = [
        Take("sum", blanks), Take("most", row), Take("abs", row), Take("infinite", batch * length),
        Drop("infinite"), Drop("abs"), Take("less", blanks), Take("logsumexp", row),
        Drop("less"), Drop("most"), Drop("logsumexp"), Drop("sum"),
    ]  # fmt: skip
    if not argument(op, 8, "zero_infinity", default=False):
        return [*steps, Out(0), *sums]
    masked: list[Step] = [Take("mask", batch), Take("zero", item), Out(0)]
    return [*steps, Take("grad", nbytes(log_probs)), *sums, *masked]


def _ctc_tables(batch: int) -> list[Step]:
    return [Take(name, 8 * batch) for name in ("target lengths", "input lengths", "offsets")]


LOSSES: dict[str, Rule] = {
    "mse_loss.default": _structured,
    "smooth_l1_loss.default": _structured,
    "huber_loss.default": _huber,
    "binary_cross_entropy.default": _binary_cross_entropy,
    "binary_cross_entropy_with_logits.default": _with_logits,
    "soft_margin_loss.default": _soft_margin,
    "soft_margin_loss_backward.default": _soft_margin_backward,
    "nll_loss_forward.default": _nll,
    "nll_loss_backward.default": _nll_backward,
    "nll_loss2d_forward.default": _nll2d,
    "nll_loss2d_backward.default": _nll2d_backward,
    "_ctc_loss.default": _ctc,
    "_ctc_loss_backward.default": _ctc_backward,
}
