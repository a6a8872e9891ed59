"""More programs for the kernel probe: optimizers, clipping, gradient scaling, averages, small training loops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kernel_probe import program
from torch import nn

O = torch.optim
SMALL = ((1000, 13), (37, 13), (2049, 13))
LARGE = ((1100, 1009), (37, 13), (1049, 1103), (1009,))
F32 = (torch.float32,)
TWO = (torch.float32, torch.bfloat16)


def _steps(o, params, n=2, grad=torch.empty_like, **zero):
    for _ in range(n):
        for p in params:
            p.grad = grad(p)
        o.step()
        o.zero_grad(**zero)


def device_rate(optimizer):
    """Puts the learning rate on the device; after construction, whose check the phantom's zeros would fail."""
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"], device="cuda")
    return optimizer


def opt(name, make, shapes=LARGE, dtypes=F32, layout=None, grad=torch.empty_like, n=2, **zero):
    def f(t):
        params = [nn.Parameter(t(*s) if layout is None else layout(t, s)) for s in shapes]
        _steps(make(params), params, n, grad, **zero)

    f.__name__ = "optx_" + name
    program(dtypes=dtypes)(f)


ALL = "SGD Adam AdamW NAdam RAdam Adamax Adadelta Adagrad ASGD Rprop RMSprop".split()
for _n in ALL:
    opt(_n.lower(), lambda p, n=_n: getattr(O, n)(p, lr=0.01), dtypes=TWO)
    opt(_n.lower() + "_foreach_on", lambda p, n=_n: getattr(O, n)(p, lr=0.01, foreach=True), SMALL)
    opt(_n.lower() + "_single", lambda p, n=_n: getattr(O, n)(p, lr=0.01, foreach=False), dtypes=TWO)
    opt(_n.lower() + "_maximize", lambda p, n=_n: getattr(O, n)(p, lr=0.01, maximize=True))
    opt(_n.lower() + "_maximize_single", lambda p, n=_n: getattr(O, n)(p, lr=0.01, maximize=True, foreach=False))
    opt(_n.lower() + "_half", lambda p, n=_n: getattr(O, n)(p, lr=0.01), SMALL, (torch.float16, torch.float64))
    opt(
        _n.lower() + "_transposed",
        lambda p, n=_n: getattr(O, n)(p, lr=0.01),
        ((1000, 13), (37, 13)),
        layout=lambda t, s: t(*s[::-1]).t(),
        grad=lambda p: torch.empty(p.shape, dtype=p.dtype, device=p.device),
    )
    opt(
        _n.lower() + "_gaps",
        lambda p, n=_n: getattr(O, n)(p, lr=0.01),
        ((1000, 13), (37, 13)),
        layout=lambda t, s: t(s[0], 2 * s[1])[:, : s[1]],
    )
    if _n != "Rprop":
        opt(_n.lower() + "_decay", lambda p, n=_n: getattr(O, n)(p, lr=0.01, weight_decay=0.1))
        opt(_n.lower() + "_decay_max", lambda p, n=_n: getattr(O, n)(p, lr=0.01, weight_decay=0.1, maximize=True))
        opt(_n.lower() + "_decay_single", lambda p, n=_n: getattr(O, n)(p, lr=0.01, weight_decay=0.1, foreach=False))
    if _n not in ("SGD", "Adagrad"):
        opt(_n.lower() + "_capturable", lambda p, n=_n: getattr(O, n)(p, lr=0.01, capturable=True), dtypes=TWO)
        opt(
            _n.lower() + "_capturable_single", lambda p, n=_n: getattr(O, n)(p, lr=0.01, capturable=True, foreach=False)
        )
for _n in ("Adam", "AdamW", "SGD", "Adagrad"):
    opt(_n.lower() + "_fused", lambda p, n=_n: getattr(O, n)(p, lr=0.01, fused=True), dtypes=TWO)
    opt(
        _n.lower() + "_fused_gaps",
        lambda p, n=_n: getattr(O, n)(p, lr=0.01, fused=True),
        ((1000, 13), (37, 13)),
        layout=lambda t, s: t(s[0], 2 * s[1])[:, : s[1]],
    )
for _n in ("Adam", "AdamW"):
    for _k in ("foreach", "fused"):
        opt(f"{_n.lower()}_amsgrad_{_k}", lambda p, n=_n, k=_k: getattr(O, n)(p, amsgrad=True, **{k: True}))
    opt(f"{_n.lower()}_amsgrad_single", lambda p, n=_n: getattr(O, n)(p, amsgrad=True, foreach=False))
    opt(f"{_n.lower()}_amsgrad_capturable", lambda p, n=_n: getattr(O, n)(p, amsgrad=True, capturable=True))
    opt(f"{_n.lower()}_fused_capturable", lambda p, n=_n: getattr(O, n)(p, fused=True, capturable=True))
    opt(f"{_n.lower()}_lr_device", lambda p, n=_n: device_rate(getattr(O, n)(p, lr=0.01, capturable=True)))
    opt(f"{_n.lower()}_lr_host", lambda p, n=_n: getattr(O, n)(p, lr=torch.tensor(0.01), foreach=False))
    opt(f"{_n.lower()}_fused_lr_device", lambda p, n=_n: device_rate(getattr(O, n)(p, lr=0.01, fused=True)))
    opt(f"{_n.lower()}_fused_lr_host", lambda p, n=_n: getattr(O, n)(p, lr=torch.tensor(0.01), fused=True))
    opt(f"{_n.lower()}_complex", lambda p, n=_n: getattr(O, n)(p), SMALL, (torch.complex64,))
opt("sgd_momentum", lambda p: O.SGD(p, lr=0.1, momentum=0.9), dtypes=TWO)
opt("sgd_dampening", lambda p: O.SGD(p, lr=0.1, momentum=0.9, dampening=0.1))
opt("sgd_nesterov", lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4))
opt("sgd_nesterov_single", lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4, foreach=False))
opt("sgd_momentum_single", lambda p: O.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4, foreach=False))
opt("sgd_fused_momentum", lambda p: O.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True))
opt("sgd_fused_maximize", lambda p: O.SGD(p, lr=0.1, momentum=0.9, maximize=True, fused=True))
opt("sgd_lr_host", lambda p: O.SGD(p, lr=torch.tensor(0.1), momentum=0.9, foreach=False))
opt("sgd_lr_device", lambda p: device_rate(O.SGD(p, lr=0.1, momentum=0.9)))
opt("rmsprop_full", lambda p: O.RMSprop(p, momentum=0.9, centered=True), dtypes=TWO)
opt("rmsprop_full_single", lambda p: O.RMSprop(p, momentum=0.9, centered=True, foreach=False))
opt("rmsprop_centered", lambda p: O.RMSprop(p, centered=True))
opt("rmsprop_momentum", lambda p: O.RMSprop(p, momentum=0.9))
opt("radam_decoupled", lambda p: O.RAdam(p, weight_decay=0.1, decoupled_weight_decay=True), n=7)
opt("radam_long", lambda p: O.RAdam(p), n=8)
opt("radam_long_single", lambda p: O.RAdam(p, foreach=False), n=8)
opt("nadam_decoupled", lambda p: O.NAdam(p, weight_decay=0.1, decoupled_weight_decay=True))
opt("adagrad_decay_lr", lambda p: O.Adagrad(p, lr_decay=0.1))
opt("zero_grad_keep", lambda p: O.AdamW(p), set_to_none=False)
opt("sgd_zero_grad_keep", lambda p: O.SGD(p, lr=0.1, momentum=0.9), SMALL, set_to_none=False)
opt(
    "channels_last",
    lambda p: O.AdamW(p),
    ((32, 16, 3, 3), (64, 32, 3, 3), (64,)),
    layout=lambda t, s: t(*s).to(memory_format=torch.channels_last) if len(s) == 4 else t(*s),
)
opt(
    "channels_last_grad",
    lambda p: O.AdamW(p),
    ((32, 16, 3, 3), (64, 32, 3, 3), (64,)),
    grad=lambda p: torch.empty(p.shape, dtype=p.dtype, device=p.device).to(
        memory_format=torch.channels_last if p.dim() == 4 else torch.contiguous_format
    ),
)
opt("scalars", lambda p: O.AdamW(p), ((1,), (3, 1), (1000, 13)))
if hasattr(O, "Adafactor"):
    for _k in (None, True, False):
        opt(f"adafactor_{_k}", lambda p, k=_k: O.Adafactor(p, foreach=k), dtypes=TWO)
        opt(f"adafactor_decay_{_k}", lambda p, k=_k: O.Adafactor(p, foreach=k, weight_decay=0.1, maximize=True))
    opt("adafactor_small", lambda p: O.Adafactor(p), ((7,), (129, 65), (3, 5, 17, 19)))
    opt("adafactor_small_foreach", lambda p: O.Adafactor(p, foreach=True), ((7,), (129, 65), (3, 5, 17, 19)))
if hasattr(O, "Muon"):
    opt("muon", lambda p: O.Muon(p), ((1100, 1009), (37, 13), (13, 37)), TWO)
    opt("muon_rms", lambda p: O.Muon(p, adjust_lr_fn="match_rms_adamw", nesterov=False), ((513, 65), (37, 130)), TWO)


@program(dtypes=F32)
def optx_groups(t):
    a, b = [nn.Parameter(t(*s)) for s in SMALL], [nn.Parameter(t(n, 17)) for n in (99, 1003)]
    _steps(O.AdamW([{"params": a, "weight_decay": 0.1}, {"params": b, "weight_decay": 0.0}]), a + b)


@program(dtypes=F32)
def optx_mixed_dtypes(t):
    a = [nn.Parameter(t(*s, dtype=d)) for s in SMALL for d in (torch.float32, torch.float16, torch.bfloat16)]
    _steps(O.AdamW(a), a)


@program(dtypes=F32)
def optx_mixed_dtypes_sgd(t):
    a = [nn.Parameter(t(*s, dtype=d)) for s in SMALL for d in (torch.float16, torch.float32)]
    _steps(O.SGD(a, lr=0.1, momentum=0.9), a)


@program(dtypes=F32)
def optx_host_param(t):
    a = [nn.Parameter(t(*s)) for s in SMALL]
    b = [nn.Parameter(torch.empty(31, 7))]
    _steps(O.AdamW(a + b), a + b)


@program(dtypes=F32)
def optx_some_grads(t):
    a = [nn.Parameter(t(*s)) for s in SMALL]
    o = O.AdamW(a)
    for used in (a[:2], a[1:], a):
        for p in used:
            p.grad = torch.empty_like(p)
        o.step()
        o.zero_grad()


@program(dtypes=F32)
def optx_subclass(t):
    class Special(nn.Parameter):
        pass

    a = [Special(t(*s)) for s in SMALL]
    _steps(O.AdamW(a), a)


@program(dtypes=F32)
def optx_sparse(t):
    p = nn.Parameter(t(1031, 129))
    o = O.SparseAdam([p])
    for _ in range(2):
        F.embedding(t.ids(9, 13, 77), p, sparse=True).sum().backward()
        o.step()
        o.zero_grad()


@program(dtypes=F32)
def optx_state_dict(t):
    a = [nn.Parameter(t(*s)) for s in SMALL]
    o = O.AdamW(a)
    _steps(o, a, 1)
    o.load_state_dict(o.state_dict())
    _steps(o, a, 1)


@program(dtypes=F32)
def optx_closure(t):
    a = [nn.Parameter(t(*s)) for s in SMALL]
    o = O.SGD(a, lr=0.1)

    def closure():
        o.zero_grad()
        loss = sum((p * 2).sum() for p in a)
        loss.backward()
        return loss

    for _ in range(2):
        o.step(closure)


def clip(name, g, shapes=LARGE, dtypes=TWO):
    def f(t):
        params = [nn.Parameter(t(*s)) for s in shapes]
        for p in params:
            p.grad = torch.empty_like(p)
        return g(params)

    f.__name__ = "clipx_" + name
    program(dtypes=dtypes)(f)


U = nn.utils
clip("norm", lambda p: U.clip_grad_norm_(p, 1.0))
clip("norm_small", lambda p: U.clip_grad_norm_(p, 1.0), SMALL)
clip("norm_one", lambda p: U.clip_grad_norm_(p[0], 1.0), SMALL)
clip("norm_inf", lambda p: U.clip_grad_norm_(p, 1.0, norm_type=float("inf")))
clip("norm_1", lambda p: U.clip_grad_norm_(p, 1.0, norm_type=1))
clip("norm_3", lambda p: U.clip_grad_norm_(p, 1.0, norm_type=3))
clip("norm_single", lambda p: U.clip_grad_norm_(p, 1.0, foreach=False))
clip("norm_single_inf", lambda p: U.clip_grad_norm_(p, 1.0, foreach=False, norm_type=float("inf")))
clip("norm_error", lambda p: U.clip_grad_norm_(p, 1.0, error_if_nonfinite=True))
clip("value", lambda p: U.clip_grad_value_(p, 1.0))
clip("value_single", lambda p: U.clip_grad_value_(p, 1.0, foreach=False))
if hasattr(U, "get_total_norm"):
    clip("total", lambda p: U.get_total_norm([x.grad for x in p]))
    clip("total_then", lambda p: U.clip_grads_with_norm_(p, 1.0, U.get_total_norm([x.grad for x in p])))
clip("vector", lambda p: U.parameters_to_vector(p), SMALL)


@program(dtypes=F32)
def clipx_mixed(t):
    params = [nn.Parameter(t(*s, dtype=d)) for s in SMALL for d in (torch.float32, torch.float16, torch.bfloat16)]
    for p in params:
        p.grad = torch.empty_like(p)
    U.clip_grad_norm_(params, 1.0)


@program(dtypes=F32)
def clipx_gaps(t):
    params = [nn.Parameter(t(n, 13)) for n in (1000, 37)]
    for p in params:
        p.grad = torch.empty(p.shape[0], 26, device="cuda")[:, :13]
    U.clip_grad_norm_(params, 1.0)


def loop(
    name,
    optimizer,
    dtypes=F32,
    clip=None,
    accumulate=1,
    scaler=True,
    amp=torch.float16,
    zero=True,
    ema=False,
    schedule=None,
    sizes=(333, 1027, 1031),
    steps=3,
):
    def f(t):
        place = {"device": "cuda", "dtype": t.dtype}
        net = nn.Sequential(nn.Linear(*sizes[:2], **place), nn.ReLU(), nn.Linear(*sizes[1:], **place))
        o = optimizer(net.parameters())
        grad_scaler = torch.amp.GradScaler("cuda", enabled=scaler)
        x = t(64, sizes[0])
        average = O.swa_utils.AveragedModel(net, **ema) if ema is not False else None
        scheduler = schedule(o) if schedule else None
        for _ in range(steps):
            for _ in range(accumulate):
                with torch.autocast("cuda", dtype=amp or torch.float16, enabled=amp is not None):
                    y = net(x)
                    loss = y.float().pow(2).mean() / accumulate
                grad_scaler.scale(loss).backward()
            if clip:
                grad_scaler.unscale_(o)
                clip(net.parameters())
            grad_scaler.step(o)
            grad_scaler.update()
            if scheduler:
                scheduler.step()
            if average:
                average.update_parameters(net)
            o.zero_grad(set_to_none=zero)

    f.__name__ = "loop_" + name
    program(dtypes=dtypes)(f)


_adamw = lambda p: O.AdamW(p, lr=1e-3)  # noqa: E731
_norm = lambda p: U.clip_grad_norm_(p, 1.0)  # noqa: E731
loop("adamw", _adamw)
loop("adamw_clip", _adamw, clip=_norm)
loop("adamw_fused", lambda p: O.AdamW(p, fused=True))
loop("adamw_fused_clip", lambda p: O.AdamW(p, fused=True), clip=_norm)
loop("adamw_capturable", lambda p: O.AdamW(p, capturable=True), clip=_norm)
loop("adamw_single", lambda p: O.AdamW(p, foreach=False), clip=_norm)
loop("sgd", lambda p: O.SGD(p, lr=0.1, momentum=0.9), clip=_norm)
loop("sgd_fused", lambda p: O.SGD(p, lr=0.1, momentum=0.9, fused=True), clip=_norm)
loop("adagrad_fused", lambda p: O.Adagrad(p, fused=True))
loop("accumulate", _adamw, clip=_norm, accumulate=3)
loop("keep_grads", _adamw, clip=_norm, zero=False)
loop("plain", _adamw, scaler=False, amp=None, dtypes=TWO)
loop("plain_clip_value", _adamw, scaler=False, amp=None, clip=lambda p: U.clip_grad_value_(p, 1.0), dtypes=TWO)
loop("bf16", _adamw, scaler=False, amp=torch.bfloat16, clip=_norm)
loop("swa", _adamw, scaler=False, amp=None, ema={})
loop("ema", _adamw, scaler=False, amp=None, ema={"multi_avg_fn": O.swa_utils.get_ema_multi_avg_fn(0.99)})
loop("ema_single", _adamw, scaler=False, amp=None, ema={"avg_fn": O.swa_utils.get_ema_avg_fn(0.99)})
loop(
    "ema_buffers",
    _adamw,
    scaler=False,
    amp=None,
    ema={"multi_avg_fn": O.swa_utils.get_ema_multi_avg_fn(0.99), "use_buffers": True},
)
loop("cosine", _adamw, scaler=False, amp=None, schedule=lambda o: O.lr_scheduler.CosineAnnealingLR(o, 10))
loop(
    "onecycle_tensor",
    lambda p: device_rate(O.AdamW(p, lr=1e-3, capturable=True)),
    scaler=False,
    amp=None,
    schedule=lambda o: O.lr_scheduler.LinearLR(o),
)
loop(
    "fused_tensor_lr",
    lambda p: device_rate(O.AdamW(p, lr=1e-3, fused=True)),
    scaler=False,
    amp=None,
    schedule=lambda o: O.lr_scheduler.LambdaLR(o, lambda s: 0.9**s),
)
loop("large", _adamw, clip=_norm, sizes=(1100, 1203, 1009))
loop("large_fused", lambda p: O.AdamW(p, fused=True), clip=_norm, sizes=(1100, 1203, 1009))
