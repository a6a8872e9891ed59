"""Calls whose results' strides are held against CUDA's: run by itself on the phantom, it prints them as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

SHAPE = (2, 8, 4, 4)
INPUTS: dict[str, Callable[[Any], torch.Tensor]] = {
    "channels last": lambda place: torch.zeros(SHAPE, device=place).contiguous(memory_format=torch.channels_last),
    "permuted": lambda place: torch.zeros(2, 4, 8, 4, device=place).permute(0, 2, 1, 3),
    "transposed": lambda place: torch.zeros(SHAPE, device=place).transpose(2, 3),
    "sliced": lambda place: torch.zeros(2, 8, 4, 9, device=place)[..., :4],
    "expanded": lambda place: torch.zeros(1, 8, 4, 4, device=place).expand(2, -1, -1, -1),
}


def ids(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.long, device=x.device)


CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "reflect": lambda x, w: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicate": lambda x, w: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "circular": lambda x, w: F.pad(x, (1, 1, 1, 1), mode="circular"),
    "constant": lambda x, w: F.pad(x, (1, 1, 1, 1)),
    "pixel_shuffle": lambda x, w: F.pixel_shuffle(x, 2),
    "pixel_unshuffle": lambda x, w: F.pixel_unshuffle(x, 2),
    "maxpool": lambda x, w: F.max_pool2d(x, 2),
    "maxpool_idx": lambda x, w: F.max_pool2d(x, 2, return_indices=True),
    "avgpool": lambda x, w: F.avg_pool2d(x, 2),
    "aavg": lambda x, w: F.adaptive_avg_pool2d(x, 2),
    "aavg1": lambda x, w: F.adaptive_avg_pool2d(x, 1),
    "amax": lambda x, w: F.adaptive_max_pool2d(x, 2, return_indices=True),
    "lp": lambda x, w: F.lp_pool2d(x, 2.0, 2),
    "unpool": lambda x, w: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "up_aa": lambda x, w: F.interpolate(x, scale_factor=2, mode="bilinear", antialias=True),
    "grid": lambda x, w: F.grid_sample(x, torch.zeros(2, 8, 8, 2, device=x.device), align_corners=False),
    "affine": lambda x, w: F.affine_grid(
        torch.zeros(x.shape[0], 2, 3, device=x.device), list(x.shape), align_corners=False
    ),
    "unfold": lambda x, w: F.unfold(x, 3),
    "gn": lambda x, w: F.group_norm(x, 4),
    "in": lambda x, w: F.instance_norm(x),
    "lrn": lambda x, w: F.local_response_norm(x, 3),
    "ln": lambda x, w: F.layer_norm(x, x.shape[1:]),
    "ln1": lambda x, w: F.layer_norm(x, x.shape[-1:]),
    "rms": lambda x, w: F.rms_norm(x, x.shape[-1:]),
    "softmax1": lambda x, w: x.softmax(1),
    "softmax3": lambda x, w: x.softmax(3),
    "logsm": lambda x, w: x.log_softmax(1),
    "cumsum": lambda x, w: x.cumsum(1),
    "cumprod": lambda x, w: x.cumprod(1),
    "cummax": lambda x, w: x.cummax(1),
    "logcumsumexp": lambda x, w: x.logcumsumexp(1),
    "sort": lambda x, w: x.sort(1),
    "topk": lambda x, w: x.topk(2, 1),
    "argsort": lambda x, w: x.argsort(1),
    "flip": lambda x, w: x.flip(1),
    "roll": lambda x, w: x.roll(1, 1),
    "rot90": lambda x, w: x.rot90(1, (2, 3)),
    "tril": lambda x, w: x.tril(),
    "triu": lambda x, w: x.triu(),
    "gelu": lambda x, w: F.gelu(x),
    "glu": lambda x, w: F.glu(x, 1),
    "prelu": lambda x, w: F.prelu(x, w),  # noqa: PLW0108
    "hardswish": lambda x, w: F.hardswish(x),
    "rrelu": lambda x, w: F.rrelu(x, training=True),
    "softplus": lambda x, w: F.softplus(x),
    "logsig": lambda x, w: F.logsigmoid(x),
    "dropout": lambda x, w: F.dropout(x),
    "dropout2d": lambda x, w: F.dropout2d(x),
    "alpha": lambda x, w: F.alpha_dropout(x, training=True),
    "sum": lambda x, w: x.sum(1),
    "mean": lambda x, w: x.mean((2, 3), keepdim=True),
    "max1": lambda x, w: x.max(1),
    "amax1": lambda x, w: x.amax(1),
    "argmax": lambda x, w: x.argmax(1),
    "var": lambda x, w: x.var(1),
    "std": lambda x, w: x.std((2, 3)),
    "norm": lambda x, w: x.norm(dim=1),
    "norm2": lambda x, w: F.normalize(x),
    "prod": lambda x, w: x.prod(1),
    "median": lambda x, w: x.median(1),
    "kth": lambda x, w: x.kthvalue(2, 1),
    "mode": lambda x, w: x.mode(1),
    "logsumexp": lambda x, w: x.logsumexp(1),
    "all": lambda x, w: (x > 0).all(1),
    "any": lambda x, w: (x > 0).any(1),
    "varmean": lambda x, w: torch.var_mean(x, (2, 3)),
    "cat0": lambda x, w: torch.cat([x, x], 0),
    "cat1": lambda x, w: torch.cat([x, x], 1),
    "cat1m": lambda x, w: torch.cat([x, x.contiguous()], 1),
    "cat1n": lambda x, w: torch.cat([x.contiguous(), x], 1),
    "stack": lambda x, w: torch.stack([x, x]),
    "stack1": lambda x, w: torch.stack([x, x], 1),
    "repeat": lambda x, w: x.repeat(1, 2, 1, 1),
    "ri": lambda x, w: x.repeat_interleave(2, 1),
    "tile": lambda x, w: x.tile(2),
    "index_select": lambda x, w: x.index_select(1, ids(x, 3)),
    "gather": lambda x, w: x.gather(1, ids(x, 2, 4, 4, 4)),
    "idx": lambda x, w: x[:, ids(x, 3)],
    "idx2": lambda x, w: x[ids(x, 3)],
    "take": lambda x, w: x.take_along_dim(ids(x, 2, 4, 1, 1), 1),
    "where": lambda x, w: torch.where(x > 0, x, 0.0),
    "where2": lambda x, w: torch.where(x > 0, x, x.contiguous()),
    "where3": lambda x, w: torch.where(x.contiguous() > 0, x, x),
    "mf": lambda x, w: x.masked_fill(x > 0, 0.0),
    "mf2": lambda x, w: x.masked_fill(x.contiguous() > 0, 0.0),
    "ms": lambda x, w: x.masked_scatter(x > 0, x),
    "scatter": lambda x, w: x.scatter(1, ids(x, 2, 4, 4, 4), 1.0),
    "sadd": lambda x, w: x.scatter_add(1, ids(x, 2, 4, 4, 4), x),
    "iadd": lambda x, w: x.index_add(1, ids(x, 8), x),
    "ifill": lambda x, w: x.index_fill(1, ids(x, 3), 0.0),
    "icopy": lambda x, w: x.index_copy(1, torch.arange(8, device=x.device), x),
    "iput": lambda x, w: x.index_put((ids(x, 2),), x),
    "add": lambda x, w: x + x.contiguous(),
    "add2": lambda x, w: x.contiguous() + x,
    "mulb": lambda x, w: x * w.view(1, -1, 1, 1),
    "mulb2": lambda x, w: w.view(1, -1, 1, 1) * x,
    "addb": lambda x, w: x + torch.zeros(4, 4, device=x.device),
    "lerp": lambda x, w: x.lerp(x, 0.5),
    "addcmul": lambda x, w: torch.addcmul(x, x.contiguous(), x),
    "clamp": lambda x, w: x.clamp(0, 1),
    "pow": lambda x, w: x**2,
    "pow2": lambda x, w: x**x,
    "half": lambda x, w: x.half(),
    "dbl": lambda x, w: x.double(),
    "to": lambda x, w: x.to(torch.bfloat16),
    "clone": lambda x, w: x.clone(),
    "zl": lambda x, w: torch.zeros_like(x),
    "rl": lambda x, w: torch.rand_like(x),
    "ne": lambda x, w: x.new_empty(x.shape),
    "bern": lambda x, w: torch.bernoulli(x),
    "frexp": lambda x, w: torch.frexp(x),
    "nan": lambda x, w: x.nan_to_num(),
    "sign": lambda x, w: x.sign(),
    "atan2": lambda x, w: torch.atan2(x, x),
    "cplx": lambda x, w: torch.complex(x, x),
    "polar": lambda x, w: torch.polar(x, x),
    "vac": lambda x, w: torch.view_as_complex(torch.stack([x, x], -1)).abs(),
    "bn": lambda x, w: F.batch_norm(x, torch.zeros(8, device=x.device), torch.ones(8, device=x.device)),
    "bnt": lambda x, w: F.batch_norm(x, torch.zeros(8, device=x.device), torch.ones(8, device=x.device), training=True),
    "lin": lambda x, w: F.linear(x, torch.zeros(5, x.shape[-1], device=x.device)),
    "mm": lambda x, w: x @ x.transpose(2, 3),
    "einsum": lambda x, w: torch.einsum("bchw,bdhw->bcd", x, x),
    "cdist": lambda x, w: torch.cdist(x, x),
    "bce": lambda x, w: F.binary_cross_entropy_with_logits(x, x, reduction="none"),
    "mse": lambda x, w: F.mse_loss(x, x, reduction="none"),
    "l1": lambda x, w: F.l1_loss(x, x.contiguous(), reduction="none"),
    "sl1": lambda x, w: F.smooth_l1_loss(x, x, reduction="none"),
    "hub": lambda x, w: F.huber_loss(x, x, reduction="none"),
    "kl": lambda x, w: F.kl_div(x, x, reduction="none"),
    "nll": lambda x, w: F.cross_entropy(x, ids(x, 2, 4, 4), reduction="none"),
    "oneh": lambda x, w: F.one_hot(ids(x, 2, 4, 4), 5),
    "emb": lambda x, w: F.embedding(ids(x, 2, 4, 4).transpose(1, 2), torch.zeros(5, 6, device=x.device)),
    "diff": lambda x, w: x.diff(dim=1),
    "cov": lambda x, w: torch.cov(x[0, 0]),
    "outer": lambda x, w: torch.outer(w, w),
    "kron": lambda x, w: torch.kron(x[0, 0], x[0, 0]),
    "renorm": lambda x, w: x.renorm(2, 1, 1.0),
    "bucket": lambda x, w: torch.bucketize(x, w),  # noqa: PLW0108
    "cross": lambda x, w: torch.cross(x[:, :3], x[:, :3], dim=1),
    "meshgrid": lambda x, w: torch.meshgrid(w, w, indexing="ij")[0].clone(),
    "cross_e": lambda x, w: F.cosine_similarity(x, x),
    "pdist": lambda x, w: F.pairwise_distance(x, x),
    "unfold_t": lambda x, w: x.unfold(2, 2, 1).clone(),
    "fold": lambda x, w: F.fold(torch.zeros(2, 8 * 9, 16, device=x.device), (6, 6), 3),
    "nanmean": lambda x, w: x.nanmean(1),
    "quant": lambda x, w: x.quantile(0.5, dim=1),
    "fq": lambda x, w: torch.fake_quantize_per_tensor_affine(x, 1.0, 0, 0, 255),
    "cummin": lambda x, w: x.cummin(1),
    "trapz": lambda x, w: torch.trapezoid(x, dim=1),
    "fft": lambda x, w: torch.fft.rfft2(x),
    "inv": lambda x, w: torch.linalg.inv(x),
    "chol": lambda x, w: torch.linalg.cholesky(x),
    "solve": lambda x, w: torch.linalg.solve(x, x),
    "st": lambda x, w: torch.linalg.solve_triangular(x, x, upper=True),
    "det": lambda x, w: torch.linalg.det(x),
    "slog": lambda x, w: torch.linalg.slogdet(x),
    "mp": lambda x, w: torch.linalg.matrix_power(x, 3),
}


def strides(given: Any) -> list[tuple[int, ...]]:
    return [tuple(t.stride()) for t in (given if isinstance(given, tuple | list) else [given])]


def of_call(name: str, x: torch.Tensor, weight: torch.Tensor) -> list[list[tuple[int, ...]]] | str:
    """Strides of the results, and of the input's gradient if there is one; or that the call is refused."""
    x = x.detach().requires_grad_()
    try:
        out = CALLS[name](x, weight)
        first = out[0] if isinstance(out, tuple | list) else out
        if not first.requires_grad:
            return [strides(out)]
        (gradient,) = torch.autograd.grad(first, x, torch.zeros_like(first))
    except RuntimeError as error:
        return type(error).__name__
    return [strides(out), strides(gradient)]


def table(place: Any) -> dict[str, Any]:
    weight = torch.zeros(SHAPE[1], device=place)
    return {
        f"{name}, {layout}": of_call(name, make(place), weight) for name in CALLS for layout, make in INPUTS.items()
    }


if __name__ == "__main__":
    print(json.dumps(table("cuda")))  # noqa: T201
