"""Softmax, pointwise, pooling, resampling and concatenation operators called one by one, without autograd.

Imported by ``kernel_probe.py``. Ends with small programs of the layers that are not in ``kernel_probe.py``.
"""

import torch
import torch.nn.functional as F
from kernel_probe import FLOATS, program

aten = torch.ops.aten


def call(name, f, dtypes=FLOATS):
    def g(t):
        with torch.no_grad():
            f(t)

    g.__name__ = "kp_" + name
    program(dtypes=dtypes)(g)


def bools(*shape):
    return torch.zeros(*shape, dtype=torch.bool, device="cuda")


def cl(x):
    return x.contiguous(memory_format=torch.channels_last)


for _name in ("softmax", "log_softmax"):
    _f, _b = getattr(aten, "_" + _name), getattr(aten, f"_{_name}_backward_data")
    for _label, _shape, _dim in (
        ("last", (7, 33, 17), -1),
        ("mid", (7, 33, 17), 1),
        ("first", (7, 33, 17), 0),
        ("big", (3, 5000), 1),
        ("huge", (3, 50000), 1),
        ("one", (33,), 0),
        ("n1", (33, 1), 1),
        ("odd", (3, 1025), 1),
    ):
        call(f"{_name}_{_label}", lambda t, f=_f, s=_shape, d=_dim: f(t(*s), d, False))
        call(f"{_name}_bw_{_label}", lambda t, f=_b, s=_shape, d=_dim: f(t(*s), t(*s), d, t.dtype))
    call(f"{_name}_t", lambda t, f=_f: f(t(7, 17, 33).transpose(1, 2), -1, False))
    call(f"{_name}_f32", lambda t, f=_f: f(t(7, 33, 17), -1, True), (torch.float16,))
    call(f"{_name}_bw_t1", lambda t, f=_b: f(t(7, 17, 33).transpose(1, 2), t(7, 33, 17), -1, t.dtype))
    call(f"{_name}_bw_t2", lambda t, f=_b: f(t(7, 33, 17), t(7, 17, 33).transpose(1, 2), -1, t.dtype))
    call(f"{_name}_bw_e", lambda t, f=_b: f(t(1).expand(7, 33, 17), t(7, 33, 17), -1, t.dtype))
    call(f"{_name}_bw_e1", lambda t, f=_b: f(t(7, 33, 1).expand(7, 33, 17), t(7, 33, 17), -1, t.dtype))
    call(
        f"{_name}_bw_half",
        lambda t, f=_b: f(t(7, 33, 17, dtype=torch.float32), t(7, 33, 17, dtype=torch.float32), -1, torch.float16),
        (torch.float16,),
    )
    call(f"{_name}_bw_cl", lambda t, f=_b: f(cl(t(7, 33, 17, 5)), cl(t(7, 33, 17, 5)), 1, t.dtype))
call("safe_softmax", lambda t: aten._safe_softmax(t(7, 33, 17), -1))
call("masked_softmax", lambda t: aten._masked_softmax(t(7, 3, 17, 17), bools(7, 3, 17, 17), -1, 2))
call("masked_softmax1", lambda t: aten._masked_softmax(t(7, 3, 17, 17), bools(7, 17), -1, 1))
call(
    "masked_softmax_bw",
    lambda t: aten._masked_softmax_backward(t(7, 3, 17, 17), t(7, 3, 17, 17), bools(7, 3, 17, 17), -1),
)
call("logsigmoid", lambda t: aten.log_sigmoid_forward(t(7, 33)))
call("logsigmoid_bw", lambda t: aten.log_sigmoid_backward(t(7, 33), t(7, 33), t(0)))
call("glu", lambda t: aten.glu(t(7, 32, 17), 1))
call("glu_bw", lambda t: aten.glu_backward(t(7, 16, 17), t(7, 32, 17), 1))
call("glu_bw_t", lambda t: aten.glu_backward(t(7, 17, 16).transpose(1, 2), t(7, 32, 17), 1))
call("prelu", lambda t: aten._prelu_kernel(t(7, 32, 17), t(32, 1)))
call("prelu_bw", lambda t: aten._prelu_kernel_backward(t(7, 32, 17), t(7, 32, 17), t(32, 1)))
call("rrelu", lambda t: aten.rrelu_with_noise(t(7, 33), t(7, 33), 0.1, 0.3, True))
call("native_dropout", lambda t: aten.native_dropout(t(7, 33), 0.1, True))
call("native_dropout_t", lambda t: aten.native_dropout(t(7, 33).t(), 0.1, True))
call("native_dropout_slice", lambda t: aten.native_dropout(t(7, 33)[:, ::2], 0.1, True))
call("native_dropout_eval", lambda t: aten.native_dropout(t(7, 33), 0.1, False))
call("native_dropout_0", lambda t: aten.native_dropout(t(7, 33), 0.0, True))
call("native_dropout_1", lambda t: aten.native_dropout(t(7, 33), 1.0, True))
call("native_dropout_bw", lambda t: aten.native_dropout_backward(t(7, 33), bools(7, 33), 1.1))
call("native_dropout_bw_t", lambda t: aten.native_dropout_backward(t(33, 7).t(), bools(7, 33), 1.1))
call("cdist", lambda t: aten._cdist_forward(t(6, 65, 33), t(6, 65, 33), 2.0, None))
call("cdist1", lambda t: aten._cdist_forward(t(6, 65, 33), t(6, 65, 33), 1.0, None))
call("cdist_bc", lambda t: aten._cdist_forward(t(65, 33), t(6, 65, 33), 1.0, None))
call("cdist_small", lambda t: aten._cdist_forward(t(6, 5, 33), t(6, 5, 33), 2.0, None))
call("cdist_bw", lambda t: aten._cdist_backward(t(6, 65, 65), t(6, 65, 33), t(6, 65, 33), 2.0, t(6, 65, 65)))
call("pdist", lambda t: aten._pdist_forward(t(65, 33), 2.0), (torch.float32,))
call("euclidean", lambda t: aten._euclidean_dist(t(6, 65, 33), t(6, 65, 33)))
call("cross", lambda t: aten.linalg_cross(t(65, 3), t(65, 3)))
call("cross_bc", lambda t: aten.linalg_cross(t(65, 3), t(1, 3)))
call("lerp", lambda t: aten.lerp(t(65, 3), t(65, 3), 0.3))
call("lerp_t", lambda t: aten.lerp(t(65, 3), t(65, 3), t(3)))
call("where", lambda t: aten.where(bools(65, 3), t(65, 3), t(65, 3)))
call("where_bc", lambda t: aten.where(bools(65, 1), t(3), t(65, 3)))
call("where_mixed", lambda t: aten.where(bools(65, 3), t(65, 3), t(65, 3, dtype=torch.float32)))
call("where_scalar", lambda t: torch.where(bools(65, 3), t(65, 3), 0.0))
call("where_s2", lambda t: torch.where(bools(65, 3), 1.0, 0.0))
call("add_mixed", lambda t: aten.add(t(65, 3), t(65, 3, dtype=torch.float32)))
call("mul_int", lambda t: aten.mul(t(65, 3), torch.zeros(65, 3, dtype=torch.long, device="cuda")))
call("div_int", lambda t: aten.div(torch.zeros(65, 3, dtype=torch.long, device="cuda"), 3))
call("div_mode", lambda t: aten.div(t(65, 3), 3.0, rounding_mode="floor"))
call("pow_int", lambda t: aten.pow(torch.zeros(65, 3, dtype=torch.long, device="cuda"), 2))
call("pow_tt", lambda t: aten.pow(t(65, 3), t(65, 3, dtype=torch.float32)))
call("pow_st", lambda t: aten.pow(2.0, t(65, 3)))
call("eq_mixed", lambda t: aten.eq(t(65, 3), t(65, 3, dtype=torch.float32)))
call("sin_int", lambda t: aten.sin(torch.zeros(65, 3, dtype=torch.long, device="cuda")))
call("add_", lambda t: aten.add_(t(65, 3), t(65, 3, dtype=torch.float32)))
call("add_f32_", lambda t: aten.add_(t(65, 3, dtype=torch.float32), t(65, 3)))
call("mul_f32_", lambda t: aten.mul_(t(65, 3, dtype=torch.float32), t(65, 3)))
call("mul_int_", lambda t: aten.mul_(t(65, 3), torch.zeros(65, 3, dtype=torch.long, device="cuda")))
call("sub_overlap", lambda t: (lambda x: aten.add_(x[1:], x[:-1]))(t(65, 3)))
call("addcmul_mixed", lambda t: aten.addcmul(t(65, 3, dtype=torch.float32), t(65, 3), t(65, 3)))
call("addcmul", lambda t: aten.addcmul(t(65, 3), t(3), t(65, 1)))
call("addcdiv_", lambda t: aten.addcdiv_(t(65, 3), t(65, 3), t(65, 3)))
call("clamp_t", lambda t: aten.clamp(t(65, 3), t(3), t(3)))
call("copy_cast", lambda t: t(65, 3).copy_(t(65, 3, dtype=torch.float64)))
call("copy_t", lambda t: t(65, 33).copy_(t(33, 65).t()))
call("copy_cast_t", lambda t: t(65, 33).copy_(t(33, 65, dtype=torch.float64).t()))
call("to_t", lambda t: t(65, 33).t().to(torch.float64))
call("complex", lambda t: torch.view_as_complex(t(65, 2, dtype=torch.float32)).mul(2.0), (torch.float32,))
call("polar", lambda t: torch.polar(t(65, 2), t(65, 2)), (torch.float32,))
call("complex_mul", lambda t: torch.view_as_complex(t(65, 5, 2)) * torch.view_as_complex(t(65, 5, 2)), (torch.float32,))
call("isnan", lambda t: torch.isnan(t(65, 3)))
call("isinf", lambda t: torch.isinf(t(65, 3)))
call("isfinite", lambda t: torch.isfinite(t(65, 3)))
call("nan_to_num", lambda t: torch.nan_to_num(t(65, 3)))
call("logical_not", lambda t: aten.logical_not(t(65, 3)))
call("bernoulli_p", lambda t: aten.bernoulli(t(65, 3), 0.5))
call("bernoulli", lambda t: aten.bernoulli(t(65, 3)))
call("bernoulli_t", lambda t: aten.bernoulli_(t(65, 3), t(65, 3)))
call("normal", lambda t: torch.randn_like(t(65, 3)))
call("normal_slice", lambda t: t(65, 6)[:, ::2].normal_())
call("normal_tt", lambda t: torch.normal(t(65, 3), t(65, 3)))
call("uniform_slice", lambda t: t(65, 6)[:, ::2].uniform_())
call("exponential", lambda t: t(65, 3).exponential_())
call("randint", lambda t: torch.randint(0, 10, (65, 3), device="cuda"))
call("poisson", lambda t: torch.poisson(t(65, 3)))
call("arange", lambda t: torch.arange(100, device="cuda"))
call("arange_f", lambda t: torch.arange(0, 100, 0.5, device="cuda", dtype=t.dtype))
call("linspace", lambda t: torch.linspace(0, 1, 100, device="cuda", dtype=t.dtype))
call("eye", lambda t: torch.eye(33, device="cuda", dtype=t.dtype))
call("full_like", lambda t: torch.full_like(t(33, 3), 3.0))
call("equal", lambda t: torch.equal(t(33, 3), t(33, 3)))
call("allclose", lambda t: torch.allclose(t(33, 3), t(33, 3)))
call("softplus_bw", lambda t: aten.softplus_backward(t(33, 3), t(33, 3), 1, 20))
call("gelu_bw", lambda t: aten.gelu_backward(t(33, 3), t(33, 3)))
call("gelu_bw_t", lambda t: aten.gelu_backward(t(3, 33).t(), t(33, 3)))
call("silu_bw", lambda t: aten.silu_backward(t(33, 3), t(33, 3)))
call("threshold_bw_e", lambda t: aten.threshold_backward(t(1).expand(33, 3), t(33, 3), 0))

X4 = (5, 24, 17, 19)
for _l, _m in (
    ("c", lambda x: x),
    ("cl", cl),
    ("t", lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
    ("s", lambda x: torch.cat([x, x], 1)[:, ::2]),
):
    call(f"max_pool_{_l}", lambda t, m=_m: aten.max_pool2d_with_indices(m(t(*X4)), [3, 3], [2, 2], [1, 1]))
    call(f"avg_pool_{_l}", lambda t, m=_m: aten.avg_pool2d(m(t(*X4)), [3, 3], [2, 2], [1, 1]))
    call(f"adaptive_avg_{_l}", lambda t, m=_m: aten._adaptive_avg_pool2d(m(t(*X4)), [7, 7]))
    call(f"adaptive_avg1_{_l}", lambda t, m=_m: aten._adaptive_avg_pool2d(m(t(*X4)), [1, 1]))
    call(f"adaptive_max_{_l}", lambda t, m=_m: aten.adaptive_max_pool2d(m(t(*X4)), [7, 7]))
    call(f"up_nearest_{_l}", lambda t, m=_m: aten.upsample_nearest2d(m(t(*X4)), [34, 38], None, None))
    call(f"up_bilinear_{_l}", lambda t, m=_m: aten.upsample_bilinear2d(m(t(*X4)), [34, 38], False, None, None))
    call(f"up_bicubic_{_l}", lambda t, m=_m: aten.upsample_bicubic2d(m(t(*X4)), [34, 38], False, None, None))
    call(f"up_bilinear_aa_{_l}", lambda t, m=_m: aten._upsample_bilinear2d_aa(m(t(*X4)), [9, 9], False, None, None))
    call(f"up_bicubic_aa_{_l}", lambda t, m=_m: aten._upsample_bicubic2d_aa(m(t(*X4)), [9, 9], False, None, None))
    call(f"pad_reflect_{_l}", lambda t, m=_m: aten.reflection_pad2d(m(t(*X4)), [1, 2, 1, 2]))
    call(f"pad_replicate_{_l}", lambda t, m=_m: aten.replication_pad2d(m(t(*X4)), [1, 2, 1, 2]))
    call(f"pad_const_{_l}", lambda t, m=_m: aten.constant_pad_nd(m(t(*X4)), [1, 2, 1, 2]))
    call(f"grid_{_l}", lambda t, m=_m: aten.grid_sampler_2d(m(t(*X4)), t(5, 9, 9, 2), 0, 0, False))
    call(f"im2col_{_l}", lambda t, m=_m: aten.im2col(m(t(*X4)), [3, 3], [1, 1], [1, 1], [1, 1]))
    call(f"pixel_shuffle_{_l}", lambda t, m=_m: aten.pixel_shuffle(m(t(*X4)), 2))
    call(f"channel_shuffle_{_l}", lambda t, m=_m: aten.channel_shuffle(m(t(*X4)), 4))
    for _l2, _m2 in (
        ("c", lambda x: x),
        ("cl", cl),
        ("t", lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
        ("e", lambda x: x.new_empty(1).expand(x.shape)),
    ):
        _n = f"{_l2}.{_l}"
        call(
            f"max_pool_bw_{_n}",
            lambda t, m=_m, g=_m2: aten.max_pool2d_with_indices_backward(
                g(t(5, 24, 9, 10)),
                m(t(*X4)),
                [3, 3],
                [2, 2],
                [1, 1],
                [1, 1],
                False,
                torch.zeros(5, 24, 9, 10, dtype=torch.long, device="cuda"),
            ),
        )
        call(
            f"avg_pool_bw_{_n}",
            lambda t, m=_m, g=_m2: aten.avg_pool2d_backward(
                g(t(5, 24, 9, 10)), m(t(*X4)), [3, 3], [2, 2], [1, 1], False, True, None
            ),
        )
        call(
            f"adaptive_avg_bw_{_n}",
            lambda t, m=_m, g=_m2: aten._adaptive_avg_pool2d_backward(g(t(5, 24, 7, 7)), m(t(*X4))),
        )
        call(
            f"adaptive_max_bw_{_n}",
            lambda t, m=_m, g=_m2: aten.adaptive_max_pool2d_backward(
                g(t(5, 24, 7, 7)), m(t(*X4)), torch.zeros(5, 24, 7, 7, dtype=torch.long, device="cuda")
            ),
        )
        call(
            f"pad_reflect_bw_{_n}",
            lambda t, m=_m, g=_m2: aten.reflection_pad2d_backward(g(t(5, 24, 20, 22)), m(t(*X4)), [1, 2, 1, 2]),
        )
        call(
            f"pad_replicate_bw_{_n}",
            lambda t, m=_m, g=_m2: aten.replication_pad2d_backward(g(t(5, 24, 20, 22)), m(t(*X4)), [1, 2, 1, 2]),
        )
        call(
            f"grid_bw_{_n}",
            lambda t, m=_m, g=_m2: aten.grid_sampler_2d_backward(
                g(t(5, 24, 9, 9)), m(t(*X4)), t(5, 9, 9, 2), 0, 0, False, [True, True]
            ),
        )
        call(f"cat_{_n}", lambda t, m=_m, g=_m2: aten.cat([m(t(*X4)), g(t(*X4))], 1))
        call(f"cat_last_{_n}", lambda t, m=_m, g=_m2: aten.cat([m(t(*X4)), g(t(*X4))], 3))
for _l2, _m2 in (
    ("c", lambda x: x),
    ("cl", cl),
    ("t", lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
    ("e", lambda x: x.new_empty(1).expand(x.shape)),
):
    call(
        f"up_nearest_bw_{_l2}",
        lambda t, g=_m2: aten.upsample_nearest2d_backward(g(t(5, 24, 34, 38)), [34, 38], list(X4), None, None),
    )
    call(
        f"up_bilinear_bw_{_l2}",
        lambda t, g=_m2: aten.upsample_bilinear2d_backward(g(t(5, 24, 34, 38)), [34, 38], list(X4), False, None, None),
    )
    call(
        f"up_bicubic_bw_{_l2}",
        lambda t, g=_m2: aten.upsample_bicubic2d_backward(g(t(5, 24, 34, 38)), [34, 38], list(X4), False, None, None),
    )
    call(
        f"up_bilinear_aa_bw_{_l2}",
        lambda t, g=_m2: aten._upsample_bilinear2d_aa_backward(
            g(t(5, 24, 34, 38)), [34, 38], list(X4), False, None, None
        ),
    )
    call(
        f"col2im_{_l2}",
        lambda t, g=_m2: aten.col2im(g(t(5, 216, 17 * 19, 1))[..., 0], [17, 19], [3, 3], [1, 1], [1, 1], [1, 1]),
    )
X3, X5 = (5, 24, 37), (2, 8, 9, 11, 13)
call("max_pool1d", lambda t: F.max_pool1d(t(*X3), 3))
call("avg_pool1d", lambda t: F.avg_pool1d(t(*X3), 3))
call("adaptive_avg1d", lambda t: F.adaptive_avg_pool1d(t(*X3), 7))
call("max_pool3d", lambda t: aten.max_pool3d_with_indices(t(*X5), [2, 2, 2]))
call(
    "max_pool3d_bw",
    lambda t: aten.max_pool3d_with_indices_backward(
        t(2, 8, 4, 5, 6),
        t(*X5),
        [2, 2, 2],
        [2, 2, 2],
        [0, 0, 0],
        [1, 1, 1],
        False,
        torch.zeros(2, 8, 4, 5, 6, dtype=torch.long, device="cuda"),
    ),
)
call("avg_pool3d", lambda t: aten.avg_pool3d(t(*X5), [2, 2, 2]))
call(
    "avg_pool3d_bw",
    lambda t: aten.avg_pool3d_backward(t(2, 8, 4, 5, 6), t(*X5), [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None),
)
call("adaptive_avg3d", lambda t: aten._adaptive_avg_pool3d(t(*X5), [3, 3, 3]))
call("adaptive_avg3d_1", lambda t: aten._adaptive_avg_pool3d(t(*X5), [1, 1, 1]))
call("adaptive_avg3d_bw", lambda t: aten._adaptive_avg_pool3d_backward(t(2, 8, 3, 3, 3), t(*X5)))
call("adaptive_max3d", lambda t: aten.adaptive_max_pool3d(t(*X5), [3, 3, 3]))
call("fractional", lambda t: F.fractional_max_pool2d(t(*X4), 3, output_size=(7, 7)))
call("lp_pool", lambda t: F.lp_pool2d(t(*X4), 2, 3))
call("up_nearest1d", lambda t: aten.upsample_nearest1d(t(*X3), [74], None))
call("up_nearest1d_bw", lambda t: aten.upsample_nearest1d_backward(t(5, 24, 74), [74], list(X3), None))
call("up_linear1d", lambda t: aten.upsample_linear1d(t(*X3), [74], False, None))
call("up_linear1d_bw", lambda t: aten.upsample_linear1d_backward(t(5, 24, 74), [74], list(X3), False, None))
call("up_nearest3d", lambda t: aten.upsample_nearest3d(t(*X5), [18, 22, 26], None, None, None))
call(
    "up_nearest3d_bw",
    lambda t: aten.upsample_nearest3d_backward(t(2, 8, 18, 22, 26), [18, 22, 26], list(X5), None, None, None),
)
call("up_tri3d", lambda t: aten.upsample_trilinear3d(t(*X5), [18, 22, 26], False, None, None, None))
call(
    "up_tri3d_bw",
    lambda t: aten.upsample_trilinear3d_backward(t(2, 8, 18, 22, 26), [18, 22, 26], list(X5), False, None, None, None),
)
call("pad_reflect1d", lambda t: aten.reflection_pad1d(t(*X3), [1, 2]))
call("pad_reflect1d_bw", lambda t: aten.reflection_pad1d_backward(t(5, 24, 40), t(*X3), [1, 2]))
call("pad_replicate1d", lambda t: aten.replication_pad1d(t(*X3), [1, 2]))
call("pad_replicate1d_bw", lambda t: aten.replication_pad1d_backward(t(5, 24, 40), t(*X3), [1, 2]))
call("pad_reflect3d", lambda t: aten.reflection_pad3d(t(*X5), [1, 2, 1, 2, 1, 2]))
call("pad_replicate3d", lambda t: aten.replication_pad3d(t(*X5), [1, 2, 1, 2, 1, 2]))
call("pad_replicate3d_bw", lambda t: aten.replication_pad3d_backward(t(2, 8, 12, 14, 16), t(*X5), [1, 2, 1, 2, 1, 2]))
call("pad_circular", lambda t: F.pad(t(*X4), (1, 1, 1, 1), mode="circular"))
call("pad_neg", lambda t: F.pad(t(*X4), (-1, -1)))
call("grid3d", lambda t: aten.grid_sampler_3d(t(*X5), t(2, 5, 5, 5, 3), 0, 0, False))
call(
    "grid3d_bw",
    lambda t: aten.grid_sampler_3d_backward(t(2, 8, 5, 5, 5), t(*X5), t(2, 5, 5, 5, 3), 0, 0, False, [True, True]),
)
call(
    "grid_bw_one",
    lambda t: aten.grid_sampler_2d_backward(t(5, 24, 9, 9), t(*X4), t(5, 9, 9, 2), 0, 0, False, [False, True]),
)
call("affine_grid", lambda t: F.affine_grid(t(5, 2, 3), [5, 3, 9, 9], align_corners=False))
call("cat_mixed", lambda t: aten.cat([t(5, 24), t(5, 24, dtype=torch.float32)], 1))
call("cat_three", lambda t: aten.cat([t(5, 24), t(5, 24, dtype=torch.float64), t(5, 3)], 1))
call("cat_int", lambda t: aten.cat([t(5, 24), torch.zeros(5, 3, dtype=torch.long, device="cuda")], 1))
call("cat_empty", lambda t: aten.cat([t(0), t(5, 24)], 1))
call("cat_t", lambda t: aten.cat([t(24, 5).t(), t(24, 5).t()], 1))
call("cat_many", lambda t: aten.cat([t(5, 3) for _ in range(300)], 1))
call("stack", lambda t: aten.stack([t(5, 24), t(5, 24)], 1))
call("stack_mixed", lambda t: aten.stack([t(5, 24), t(5, 24, dtype=torch.float32)], 1))
call("hstack", lambda t: torch.hstack([t(5, 24), t(5, 24)]))
call("block_diag", lambda t: torch.block_diag(t(5, 24), t(3, 7)))
call("fft", lambda t: torch.fft.fft(t(33, 64)), (torch.float32,))
call("fft2", lambda t: torch.fft.fft2(t(33, 64)), (torch.float32,))
call("rfft", lambda t: torch.fft.rfft(t(33, 64)), (torch.float32,))
call("rfft2", lambda t: torch.fft.rfft2(t(5, 33, 64)), (torch.float32,))
call("irfft", lambda t: torch.fft.irfft(torch.view_as_complex(t(33, 33, 2))), (torch.float32,))
call("irfft2", lambda t: torch.fft.irfft2(torch.view_as_complex(t(5, 33, 33, 2))), (torch.float32,))
call("ifft", lambda t: torch.fft.ifft(torch.view_as_complex(t(33, 64, 2))), (torch.float32,))
call("fftshift", lambda t: torch.fft.fftshift(t(33, 64)), (torch.float32,))
call("fftn", lambda t: torch.fft.fftn(t(5, 33, 64), dim=(0, 2)), (torch.float32,))
call("rfft_t", lambda t: torch.fft.rfft(t(64, 33).t()), (torch.float32,))
call("rfft_mid", lambda t: torch.fft.rfft(t(5, 64, 33), dim=1), (torch.float32,))
call("irfft_mid", lambda t: torch.fft.irfft(torch.view_as_complex(t(5, 33, 33, 2)), dim=1), (torch.float32,))
call("stft", lambda t: torch.stft(t(5, 4000), 400, 160, window=t(400), return_complex=True), (torch.float32,))
call("nll", lambda t: aten.nll_loss_forward(t(33, 7), torch.zeros(33, dtype=torch.long, device="cuda"), None, 1, -100))
call(
    "nll2d",
    lambda t: aten.nll_loss2d_forward(
        t(3, 7, 5, 5), torch.zeros(3, 5, 5, dtype=torch.long, device="cuda"), None, 1, -100
    ),
)
call("mm_int", lambda t: torch.zeros(3, 3, dtype=torch.long, device="cuda") + 1)
call("inverse", lambda t: torch.linalg.inv(t(5, 33, 33)), (torch.float32,))
call("cholesky", lambda t: torch.linalg.cholesky(t(5, 33, 33)), (torch.float32,))
call("solve", lambda t: torch.linalg.solve(t(5, 33, 33), t(5, 33, 7)), (torch.float32,))
call("det", lambda t: torch.linalg.det(t(5, 33, 33)), (torch.float32,))
call("svd", lambda t: torch.linalg.svd(t(33, 33)), (torch.float32,))
call("qr", lambda t: torch.linalg.qr(t(33, 33)), (torch.float32,))
call("eigh", lambda t: torch.linalg.eigh(t(33, 33)), (torch.float32,))
