"""More programs for kernel_probe.py: reductions, losses and normalisations."""

from __future__ import annotations

import itertools

import kernel_probe
import torch
import torch.nn.functional as F

# name -> (shape, how to lay it out)
LAYOUTS = {
    "wide": ((7, 300001), lambda x: x),
    "wide2": ((3, 64, 4096), lambda x: x),
    "tall": ((200000, 6), lambda x: x),
    "tall8": ((100000, 8), lambda x: x),
    "tall64": ((50000, 64), lambda x: x),
    "tall768": ((9000, 768), lambda x: x),
    "tall770": ((9000, 770), lambda x: x),
    "image": ((8, 24, 57, 61), lambda x: x),
    "image_cl": ((8, 24, 57, 61), lambda x: x.contiguous(memory_format=torch.channels_last)),
    "image_big": ((16, 64, 112, 112), lambda x: x),
    "odd": ((5, 257, 3, 129), lambda x: x.permute(2, 0, 3, 1)),
    "slice": ((5, 257, 400), lambda x: x[:, 3:250:2, 7:]),
    "expanded": ((1, 2000, 17), lambda x: x.expand(9, -1, -1)),
    "vector": ((1000003,), lambda x: x),
    "vector_even": ((1 << 21,), lambda x: x),
    "ones": ((1, 1, 70001), lambda x: x),
}
DIMS = (None, (0,), (-1,), (0, -1), (1,), (0, 2, 3), (0, 1))
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _all(operator):
    """Each layout with each dimension that it has, in one program of many calls: few programs, many cases."""

    def program(t):
        for shape, lay in LAYOUTS.values():
            x = lay(t(*shape))
            for dims, keepdim in itertools.product(DIMS, (False, True)):
                if dims is not None and (max(dims) >= x.dim() or len({d % x.dim() for d in dims}) < len(dims)):
                    continue
                operator(x, dims, keepdim)

    return program


def _several(f):
    return lambda x, dims, keepdim: f(x, dim=dims, keepdim=keepdim) if dims else (keepdim or f(x))


def _single(f):
    def call(x, dims, keepdim):
        if dims is None and not keepdim:
            f(x)
        elif dims is not None and len(dims) == 1:
            f(x, dim=dims[0], keepdim=keepdim)

    return call


REDUCTIONS = {
    "sum": (_several(torch.sum), (*DTYPES, torch.int64)),
    "sum_int": (_several(torch.sum), (torch.bool, torch.int32, torch.uint8)),
    "sum_f32": (lambda x, d, k: torch.sum(x, d, keepdim=k, dtype=torch.float32), (torch.float16, torch.bfloat16)),
    "sum_f64": (lambda x, d, k: torch.sum(x, d, keepdim=k, dtype=torch.float64), (torch.float16, torch.float32)),
    "mean": (_several(torch.mean), DTYPES),
    "mean_f32": (lambda x, d, k: torch.mean(x, d, keepdim=k, dtype=torch.float32), (torch.float16, torch.int64)),
    "norm2": (lambda x, d, k: torch.linalg.vector_norm(x, dim=d, keepdim=k), DTYPES),
    "norm1": (lambda x, d, k: torch.linalg.vector_norm(x, 1, dim=d, keepdim=k), DTYPES[:2]),
    "norm_f32": (lambda x, d, k: torch.linalg.vector_norm(x, dim=d, keepdim=k, dtype=torch.float32), DTYPES[1:3]),
    "norm_old": (lambda x, d, k: torch.norm(x, dim=d, keepdim=k), DTYPES[:2]),
    "amax": (_several(torch.amax), (*DTYPES, torch.int32)),
    "amin": (_several(torch.amin), DTYPES[:2]),
    "max": (_single(torch.max), (*DTYPES, torch.int64)),
    "min": (_single(torch.min), DTYPES[:2]),
    "argmax": (_single(torch.argmax), (*DTYPES, torch.int64)),
    "aminmax": (_single(lambda x, **kw: torch.aminmax(x, **kw)), DTYPES[:3]),
    "any": (_several(torch.any), (torch.bool, torch.float32, torch.float16)),
    "all": (_single(torch.all), (torch.bool, torch.float32)),
    "prod": (_single(torch.prod), (*DTYPES[:3], torch.int32)),
    "nansum": (_several(torch.nansum), DTYPES[:3]),
    "logsumexp": (lambda x, d, k: d and torch.logsumexp(x, d, k), DTYPES),
    "var": (lambda x, d, k: torch.var(x, d, keepdim=k), DTYPES),
    "std": (lambda x, d, k: torch.std(x, d, keepdim=k), DTYPES[:2]),
    "var_mean": (lambda x, d, k: torch.var_mean(x, d, keepdim=k), DTYPES),
    "count_nonzero": (lambda x, d, k: k or torch.count_nonzero(x, d), (torch.float32, torch.bool)),
}


def _huge(t):
    x = t(3, 1 << 30)
    x.sum(), x.sum(0), x.sum(1), x.amax(1), x.mean(1), x.argmax(1), torch.var_mean(x, 1)
    del x
    x = t((1 << 28) + 5, 9)
    x.sum(), x.sum(0), x.sum(1), x.amax(0), x.mean(0), x.max(0), torch.linalg.vector_norm(x)


def _losses(probe):
    shapes = {"2d": (129, 1031), "small": (7, 33), "big": (300, 4096), "4d": (2, 3, 65, 67)}
    losses = {
        "mse": F.mse_loss,
        "l1": F.l1_loss,
        "smooth_l1": F.smooth_l1_loss,
        "smooth_l1_0": lambda x, y, reduction: F.smooth_l1_loss(x, y, reduction=reduction, beta=0.0),
        "huber": F.huber_loss,
        "bce": lambda x, y, reduction: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), reduction=reduction),
        "bce_weight": lambda x, y, reduction: F.binary_cross_entropy(x.sigmoid(), y, y.sigmoid(), reduction=reduction),
        "bce_logits": F.binary_cross_entropy_with_logits,
        "bce_logits_weight": lambda x, y, reduction: F.binary_cross_entropy_with_logits(
            x, y, y.exp(), reduction=reduction
        ),
        "bce_logits_pos": lambda x, y, reduction: F.binary_cross_entropy_with_logits(
            x, y, pos_weight=y[..., 0:1].exp(), reduction=reduction
        ),
        "kl": F.kl_div,
        "kl_log": lambda x, y, reduction: F.kl_div(x, y, reduction=reduction, log_target=True),
        "soft_margin": F.soft_margin_loss,
        "poisson": F.poisson_nll_loss,
        "hinge": F.hinge_embedding_loss,
        "gaussian": lambda x, y, reduction: F.gaussian_nll_loss(x, y, y.exp(), reduction=reduction),
    }
    for (name, loss), (shape_name, shape) in itertools.product(losses.items(), shapes.items()):
        for reduction in ("mean", "sum", "none"):
            if (reduction != "mean" and shape_name != "2d") or (
                shape_name == "big" and name not in ("mse", "bce", "kl")
            ):
                continue

            def f(t, loss=loss, shape=shape, reduction=reduction):
                return loss(t(*shape, grad=True), t(*shape), reduction=reduction)

            f.__name__ = f"loss_{name}_{shape_name}_{reduction}"
            probe.program(amp=(torch.float16,))(f)
    targets = {
        "1d": ((1031,), ()), "2d": ((129, 1031), (129,)), "big": ((4096, 5003), (4096,)), "3d": ((5, 31, 77), (5, 77)),
        "4d": ((3, 21, 65, 67), (3, 65, 67)),
    }  # fmt: skip
    for (name, (shape, target)), reduction in itertools.product(targets.items(), ("mean", "sum", "none")):
        for kind in ("nll", "nll_weight", "ce", "ce_weight", "ce_smooth"):

            def f(t, shape=shape, target=target, reduction=reduction, kind=kind):
                x, y = t(*shape, grad=True), t.ids(5, *target)
                weight = t(shape[0 if len(shape) == 1 else 1]) if "weight" in kind else None
                if kind.startswith("nll"):
                    return F.nll_loss(x.log_softmax(-1), y, weight, reduction=reduction)
                return F.cross_entropy(
                    x, y, weight, reduction=reduction, label_smoothing=0.1 if "smooth" in kind else 0.0
                )

            f.__name__ = f"loss_{kind}_{name}_{reduction}"
            probe.program(amp=(torch.float16,))(f)

    def mse_broadcast(t):
        return F.mse_loss(t(129, 1031, grad=True), t(129, 1, grad=True).expand(129, 1031))

    def mse_mixed(t):
        return F.mse_loss(t(129, 1031, grad=True), t(129, 1031, dtype=torch.float32))

    def soft_targets(t):
        return F.cross_entropy(t(129, 1031, grad=True), t(129, 1031))

    def mse_both(t):
        return F.mse_loss(t(129, 1031, grad=True), t(129, 1031, grad=True))

    for f in (mse_broadcast, mse_mixed, soft_targets, mse_both):
        f.__name__ = "loss_" + f.__name__
        probe.program(amp=(torch.float16,))(f)


def _norms(probe):
    shapes = {
        "image": (5, 24, 37, 41), "big": (16, 64, 56, 56), "2d": (333, 24), "2d_big": (4096, 1024), "3d": (6, 96, 333),
        "5d": (2, 8, 9, 17, 19), "one": (4, 96, 1, 1), "tiny": (1, 512, 3, 3), "many": (70000, 16),
    }  # fmt: skip

    def batch(t, x, train, stats, affine, dtype):
        c = x.shape[1]
        running = [t(c, dtype=dtype) for _ in range(2)] if stats else [None, None]
        parameters = [t(c, grad=True, dtype=dtype) for _ in range(2)] if affine else [None, None]
        return F.batch_norm(x, *running, *parameters, train)

    cases = itertools.product(shapes.items(), (True, False), ("", "mixed", "plain", "nostats"), (False, True))
    for (name, shape), train, kind, last in cases:
        if (not train and kind in ("plain", "nostats")) or (last and len(shape) not in (4, 5)):
            continue

        def f(t, x, train=train, kind=kind, last=last):
            if last:
                x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
            stats = kind in ("", "mixed")
            return batch(t, x, train, stats, kind != "plain", torch.float32 if kind == "mixed" else None)

        probe.norm(f"bn_{name}_{'train' if train else 'eval'}_{kind}{'_cl' if last else ''}", f, shape)
    for name in ("image", "big", "5d", "3d"):

        def frozen(t, x):
            c = x.shape[1]
            with torch.no_grad():
                return F.batch_norm(x, t(c), t(c), t(c), t(c), training=False)

        def mismatched(t, x):
            c = x.shape[1]
            y = F.batch_norm(x, t(c), t(c), t(c, grad=True), t(c, grad=True), training=True)
            return y.transpose(1, -1).contiguous()

        def head(t, x):
            c = x.shape[1]
            return F.batch_norm(x.detach(), t(c), t(c), t(c, grad=True), t(c, grad=True), training=True)

        probe.norm(f"bn_{name}_nograd", frozen, shapes[name])
        probe.norm(f"bn_{name}_mismatched", mismatched, shapes[name])
        probe.norm(f"bn_{name}_noinput", head, shapes[name])
    layouts = {
        "slice": lambda x: x[:, ::2], "crop": lambda x: x[..., 3:30], "rows": lambda x: x[1:], "swap": lambda x: x.transpose(-1, -2),
        "cl_slice": lambda x: x.contiguous(memory_format=torch.channels_last)[:, :12],
        "cl_crop": lambda x: x.contiguous(memory_format=torch.channels_last)[..., 3:30],
    }  # fmt: skip
    for name, lay in layouts.items():
        for train, kind in ((True, ""), (True, "plain"), (False, ""), (True, "mixed"), (False, "mixed")):

            def f(t, x, train=train, kind=kind, lay=lay):
                dtype = torch.float32 if kind == "mixed" else None
                return batch(t, lay(x), train, kind != "plain", kind != "plain", dtype)

            probe.norm(f"bn_lay_{name}_{'train' if train else 'eval'}_{kind}", f, (9, 24, 37, 41))

            def g(t, x, f=f):
                y = f(t, x)
                return (
                    y.contiguous()
                    if y.is_contiguous(memory_format=torch.channels_last)
                    else y.transpose(1, -1).contiguous()
                )

            probe.norm(f"bn_lay_{name}_{'train' if train else 'eval'}_{kind}_mis", g, (9, 24, 37, 41))
    probe.norm(
        "ln_tall_square", lambda t, x: F.layer_norm(x, (4, 8), t(4, 8, grad=True), t(4, 8, grad=True)), (70000, 4, 8)
    )
    probe.norm(
        "ln_tall_expanded",
        lambda t, x: F.layer_norm(x, (8,), t(8, grad=True), t(8, grad=True)).sum((0, 1)),
        (70000, 4, 8),
    )
    _layer_norms(probe)
    _group_norms(probe, shapes)


def _layer_norms(probe):
    shapes = {
        "narrow": (500, 40), "512": (64, 512), "wide": (7, 5000), "tall": (200000, 32), "tall1024": (70000, 64),
        "tall_odd": (100001, 33), "long": (9, 1000, 768), "one": (1, 4096), "rows": (40000, 256), "vision": (3, 197, 192),
        "half": (65536, 128), "many": (65535, 128), "tiny": (3, 8), "2dims": (60, 5, 77),
    }  # fmt: skip
    for name, shape in shapes.items():
        n = shape[-1]
        kinds = {
            "": lambda t, x, n=n: F.layer_norm(x, (n,), t(n, grad=True), t(n, grad=True)),
            "_nobias": lambda t, x, n=n: F.layer_norm(x, (n,), t(n, grad=True)),
            "_plain": lambda t, x, n=n: F.layer_norm(x, (n,)),
            "_frozen": lambda t, x, n=n: F.layer_norm(x, (n,), t(n), t(n)),
            "_noinput": lambda t, x, n=n: F.layer_norm(x.detach(), (n,), t(n, grad=True), t(n, grad=True)),
            "_mixed": lambda t, x, n=n: F.layer_norm(
                x, (n,), t(n, grad=True, dtype=torch.float32), t(n, grad=True, dtype=torch.float32)
            ),
        }
        for kind, f in kinds.items():
            probe.norm(f"ln_{name}{kind}", f, shape)
        probe.norm(f"rms_{name}", lambda t, x, n=n: F.rms_norm(x, (n,), t(n, grad=True)), shape)
        probe.norm(f"rms_{name}_plain", lambda t, x, n=n: F.rms_norm(x, (n,)), shape)
        probe.norm(f"rms_{name}_frozen", lambda t, x, n=n: F.rms_norm(x, (n,), t(n)), shape)
        probe.norm(f"rms_{name}_noinput", lambda t, x, n=n: F.rms_norm(x.detach(), (n,), t(n, grad=True)), shape)
        probe.norm(
            f"rms_{name}_mixed", lambda t, x, n=n: F.rms_norm(x, (n,), t(n, grad=True, dtype=torch.float32)), shape
        )
    probe.norm(
        "ln_2d_shape",
        lambda t, x: F.layer_norm(x, x.shape[1:], t(24, 37, grad=True), t(24, 37, grad=True)),
        (50, 24, 37),
    )
    probe.norm(
        "ln_permuted",
        lambda t, x: F.layer_norm(x.transpose(1, 2), (24,), t(24, grad=True), t(24, grad=True)),
        (50, 24, 37),
    )
    probe.norm(
        "ln_slice", lambda t, x: F.layer_norm(x[:, 3:20], (37,), t(37, grad=True), t(37, grad=True)), (50, 24, 37)
    )
    probe.norm(
        "ln_grad_expanded",
        lambda t, x: F.layer_norm(x, (37,), t(37, grad=True), t(37, grad=True)).mean(1),
        (50, 24, 37),
    )
    probe.norm(
        "ln_grad_transposed",
        lambda t, x: F.layer_norm(x, (37,), t(37, grad=True), t(37, grad=True)).transpose(1, 2).contiguous(),
        (50, 24, 37),
    )
    probe.norm("rms_permuted", lambda t, x: F.rms_norm(x.transpose(1, 2), (24,), t(24, grad=True)), (50, 24, 37))
    probe.norm("rms_eps", lambda t, x: F.rms_norm(x, (37,), t(37, grad=True), 1e-6), (50, 24, 37))
    probe.norm("rms_grad_expanded", lambda t, x: F.rms_norm(x, (37,), t(37, grad=True)).sum(1), (50, 24, 37))


def _group_norms(probe, shapes):
    for name, groups in (("image", 8), ("image", 1), ("image", 24), ("big", 32), ("2d", 4), ("3d", 32), ("5d", 2),
                         ("one", 32), ("tiny", 32), ("2d_big", 32), ("many", 4)):  # fmt: skip
        shape = shapes[name]
        c = shape[1]
        kinds = {
            "": lambda t, x, g=groups, c=c: F.group_norm(x, g, t(c, grad=True), t(c, grad=True)),
            "_plain": lambda t, x, g=groups: F.group_norm(x, g),
            "_frozen": lambda t, x, g=groups, c=c: F.group_norm(x, g, t(c), t(c)),
            "_noinput": lambda t, x, g=groups, c=c: F.group_norm(x.detach(), g, t(c, grad=True), t(c, grad=True)),
            "_permuted": lambda t, x, g=groups, c=c: F.group_norm(
                x.transpose(0, 1).contiguous().transpose(0, 1), g, t(c, grad=True), t(c, grad=True)
            ),
        }
        if len(shape) == 4:
            kinds["_cl"] = lambda t, x, g=groups, c=c: F.group_norm(
                x.contiguous(memory_format=torch.channels_last), g, t(c, grad=True), t(c, grad=True)
            )
        for kind, f in kinds.items():
            probe.norm(f"gn_{name}_{groups}{kind}", f, shape)
    probe.norm("in_plain", lambda t, x: F.instance_norm(x), (5, 24, 37, 41))
    probe.norm(
        "in_stats", lambda t, x: F.instance_norm(x, t(24), t(24), t(24, grad=True), t(24, grad=True)), (5, 24, 37, 41)
    )
    probe.norm(
        "in_eval",
        lambda t, x: F.instance_norm(x, t(24), t(24), t(24, grad=True), t(24, grad=True), False),
        (5, 24, 37, 41),
    )
    probe.norm("in_1d", lambda t, x: F.instance_norm(x, None, None, t(24, grad=True), t(24, grad=True)), (5, 24, 370))
    probe.norm("in_cl", lambda t, x: F.instance_norm(x.contiguous(memory_format=torch.channels_last), None, None,
                                                     t(24, grad=True), t(24, grad=True)), (5, 24, 37, 41))  # fmt: skip


def register(probe):
    """Add these programs to the probe's."""
    for name, (operator, dtypes) in REDUCTIONS.items():
        f = _all(operator)
        f.__name__ = f"red_{name}"
        probe.program(dtypes)(f)
    _huge.__name__ = "red_huge"
    probe.program(DTYPES[:3])(_huge)
    _losses(probe)
    _norms(probe)


register(kernel_probe)
