"""Indexing, sorting and scanning operators called one by one, without autograd: the kernels alone.

Imported by ``kernel_probe.py``. Sizes stand on both sides of every threshold in the C++.
"""

import torch
import torch.nn.functional as F
from kernel_probe import FLOATS, program

aten = torch.ops.aten
F32 = (torch.float32,)


def call(name, f, dtypes=FLOATS):
    """One program of direct operator calls; ``f(t)`` makes its arguments."""

    def g(t):
        with torch.no_grad():
            f(t)

    g.__name__ = "k_" + name
    program(dtypes=dtypes)(g)


def ids(*shape, dtype=torch.long):
    return torch.zeros(*shape, dtype=dtype, device="cuda")


for _n in (1, 77, 1000, 3072, 3073, 5000, 40000, 200000, 3000000):
    call(
        f"embedding_bw_{_n}",
        lambda t, n=_n: aten.embedding_dense_backward(t(n, 17), ids(n), 1031, -1, False),
        FLOATS if _n == 5000 else F32,
    )
call("embedding_bw_pad", lambda t: aten.embedding_dense_backward(t(77, 65), ids(77), 1031, 3, False))
call("embedding_bw_pad_big", lambda t: aten.embedding_dense_backward(t(5000, 65), ids(5000), 1031, 3, False))
call("embedding_bw_scale", lambda t: aten.embedding_dense_backward(t(77, 65), ids(77), 1031, -1, True))
call("embedding_bw_scale_big", lambda t: aten.embedding_dense_backward(t(5000, 65), ids(5000), 1031, -1, True))
call(
    "embedding_bw_int",
    lambda t: aten.embedding_dense_backward(t(5000, 65), ids(5000, dtype=torch.int), 1031, -1, False),
)
call(
    "embedding_bw_int_scale",
    lambda t: aten.embedding_dense_backward(t(5000, 65), ids(5000, dtype=torch.int), 1031, -1, True),
)
call(
    "embedding_bw_strided",
    lambda t: aten.embedding_dense_backward(t(65, 5000).t(), ids(5000, 2)[:, 0], 1031, -1, False),
)
call(
    "embedding_bw_strided_small",
    lambda t: aten.embedding_dense_backward(t(65, 500).t(), ids(500, 2)[:, 0], 1031, -1, False),
)
call("embedding_bw_vocab", lambda t: aten.embedding_dense_backward(t(8, 1024, 33), ids(8, 1024), 50257, -1, False))
call("embedding_bw_few", lambda t: aten.embedding_dense_backward(t(8, 1024, 33), ids(8, 1024), 2, -1, False))

for _mode in (0, 1, 2):
    call(
        f"embedding_bag_{_mode}",
        lambda t, m=_mode: aten._embedding_bag(t(1031, 65), ids(777), ids(13), False, m, False, None, False, -1),
    )
    call(
        f"embedding_bag_fo_{_mode}",
        lambda t, m=_mode: aten._embedding_bag_forward_only(
            t(1031, 65), ids(777), ids(13), False, m, False, None, False, -1
        ),
    )
    call(
        f"embedding_bag_pad_{_mode}",
        lambda t, m=_mode: aten._embedding_bag(t(1031, 65), ids(777), ids(13), False, m, False, None, False, 3),
    )
    call(
        f"embedding_bag_bw_{_mode}",
        lambda t, m=_mode: aten._embedding_bag_dense_backward(
            t(13, 65), ids(777), ids(777), ids(13), ids(*((13, 65) if m == 2 else (13,))), 1031, False, m, None, -1
        ),
    )
call(
    "embedding_bag_bw_scale",
    lambda t: aten._embedding_bag_dense_backward(
        t(13, 65), ids(777), ids(777), ids(13), ids(13), 1031, True, 0, None, -1
    ),
)
call(
    "embedding_bag_w", lambda t: aten._embedding_bag(t(1031, 65), ids(777), ids(13), False, 0, False, t(777), False, -1)
)
call(
    "embedding_bag_bw_w",
    lambda t: aten._embedding_bag_dense_backward(
        t(13, 65), ids(777), ids(777), ids(13), ids(13), 1031, False, 0, t(777), -1
    ),
)
call(
    "embedding_bag_psw_bw",
    lambda t: aten._embedding_bag_per_sample_weights_backward(
        t(13, 65), t(1031, 65), ids(777), ids(13), ids(777), 0, -1
    ),
)

for _n in (1, 100, 5000, 40000, 300000):
    call(
        f"index_put_acc_{_n}",
        lambda t, n=_n: aten.index_put(t(1031, 17), [ids(n)], t(n, 17), True),
        FLOATS if _n == 5000 else F32,
    )
call("index_put_plain", lambda t: aten.index_put(t(1031, 17), [ids(100)], t(100, 17), False))
call("index_put__plain", lambda t: aten.index_put_(t(1031, 17), [ids(100)], t(100, 17), False))
call("index_put__scalar", lambda t: aten.index_put_(t(1031, 17), [ids(100)], t(()), False))
call("index_put__acc", lambda t: aten.index_put_(t(1031, 17), [ids(100)], t(100, 17), True))
call("index_put__acc_mid", lambda t: aten.index_put_(t(31, 33, 17), [None, ids(100)], t(31, 100, 17), True))
call("index_put__acc_last", lambda t: aten.index_put_(t(31, 33, 17), [None, None, ids(100)], t(31, 33, 100), True))
call("index_put__acc_two", lambda t: aten.index_put_(t(31, 33, 17), [ids(100), ids(100)], t(100, 17), True))
call("index_put__acc_two_bc", lambda t: aten.index_put_(t(31, 33, 17), [ids(10, 1), ids(20)], t(10, 20, 17), True))
call("index_put__acc_split", lambda t: aten.index_put_(t(31, 33, 17), [ids(100), None, ids(100)], t(100, 33), True))
call("index_put__acc_bc", lambda t: aten.index_put_(t(1031, 17), [ids(100)], t(17), True))
call("index_put__acc_scalar", lambda t: aten.index_put_(t(1031, 17), [ids(100)], t(()), True))
call("index_put__acc_1d", lambda t: aten.index_put_(t(1031), [ids(100)], t(100), True))
call("index_put__acc_2d", lambda t: aten.index_put_(t(1031, 17), [ids(10, 20)], t(10, 20, 17), True))
call("index_put__acc_strided", lambda t: aten.index_put_(t(17, 1031).t(), [ids(100)], t(100, 17), True))
call("index_put__acc_slice", lambda t: aten.index_put_(t(1031, 34)[:, ::2], [ids(100)], t(100, 17), True))
call("index_put__acc_vstrided", lambda t: aten.index_put_(t(1031, 17), [ids(100)], t(17, 100).t(), True))
call("index_put__acc_int", lambda t: aten.index_put_(t(1031, 17), [ids(100, dtype=torch.int)], t(100, 17), True))
call("index_put__bool", lambda t: aten.index_put_(t(1031, 17), [ids(1031, 17, dtype=torch.bool)], t(()), False))
call("index_put__bool_row", lambda t: aten.index_put_(t(1031, 17), [ids(1031, dtype=torch.bool)], t(17), False))
call("index_put__mid", lambda t: aten.index_put_(t(31, 33, 17), [None, ids(100)], t(31, 100, 17), False))
call("index_put_acc_mid", lambda t: aten.index_put(t(31, 33, 17), [None, ids(100)], t(31, 100, 17), True))

call("index_1", lambda t: aten.index(t(1031, 17), [ids(100)]))
call("index_mid", lambda t: aten.index(t(31, 33, 17), [None, ids(100)]))
call("index_two", lambda t: aten.index(t(31, 33, 17), [ids(100), ids(100)]))
call("index_two_bc", lambda t: aten.index(t(31, 33, 17), [ids(10, 1), ids(20)]))
call("index_split", lambda t: aten.index(t(31, 33, 17), [ids(100), None, ids(100)]))
call("index_int", lambda t: aten.index(t(1031, 17), [ids(100, dtype=torch.int)]))
call("index_bool", lambda t: aten.index(t(1031, 17), [ids(1031, 17, dtype=torch.bool)]))
call("index_bool_row", lambda t: aten.index(t(1031, 17), [ids(1031, dtype=torch.bool)]))
call("index_strided", lambda t: aten.index(t(17, 1031).t(), [ids(100)]))
call("index_cpu_mix", lambda t: t(31, 33)[ids(7)[:, None], ids(5)])

for _n in (1, 100, 5000):
    call(f"index_add_{_n}", lambda t, n=_n: aten.index_add(t(1031, 17), 0, ids(n), t(n, 17)), FLOATS)
call("index_add__mid", lambda t: aten.index_add_(t(31, 33, 17), 1, ids(100), t(31, 100, 17)))
call("index_add__alpha", lambda t: aten.index_add_(t(31, 33, 17), 1, ids(100), t(31, 100, 17), alpha=2))
call("index_select_0", lambda t: aten.index_select(t(1031, 17), 0, ids(100)))
call("index_select_1", lambda t: aten.index_select(t(31, 1031), 1, ids(100)))
call("index_select_strided", lambda t: aten.index_select(t(17, 1031).t(), 1, ids(10)))
call("index_select_bw", lambda t: aten.index_select_backward(t(100, 17), [1031, 17], 0, ids(100)))
call("index_copy", lambda t: aten.index_copy(t(1031, 17), 0, ids(100), t(100, 17)))
call("index_copy_", lambda t: aten.index_copy_(t(1031, 17), 0, ids(100), t(100, 17)))
call("index_fill", lambda t: aten.index_fill(t(1031, 17), 0, ids(100), 1.0))
call("index_reduce", lambda t: aten.index_reduce(t(1031, 17), 0, ids(100), t(100, 17), "mean"))
call("scatter", lambda t: aten.scatter.src(t(1031, 17), 0, ids(100, 17), t(100, 17)))
call("scatter_value", lambda t: aten.scatter(t(1031, 17), 0, ids(100, 17), 1.0))
call("scatter_", lambda t: aten.scatter_(t(1031, 17), 0, ids(100, 17), t(100, 17)))
call("scatter_add", lambda t: aten.scatter_add(t(1031, 17), 0, ids(100, 17), t(100, 17)))
call("scatter_add_", lambda t: aten.scatter_add_(t(1031, 17), 0, ids(100, 17), t(100, 17)))
call("scatter_add_last", lambda t: aten.scatter_add_(t(31, 1031), 1, ids(31, 100), t(31, 100)))
call("scatter_add_expanded", lambda t: aten.scatter_add_(t(1031, 17), 0, ids(100, 1).expand(100, 17), t(100, 17)))
call("scatter_add_1d", lambda t: aten.scatter_add_(t(1031), 0, ids(100), t(100)))
call("scatter_reduce_mean", lambda t: aten.scatter_reduce_(t(1031, 17), 0, ids(100, 17), t(100, 17), "mean"))
call(
    "scatter_reduce_amax",
    lambda t: aten.scatter_reduce(t(1031, 17), 0, ids(100, 17), t(100, 17), "amax", include_self=False),
)
call("gather", lambda t: aten.gather(t(1031, 17), 0, ids(100, 17)))
call("take", lambda t: aten.take(t(1031, 17), ids(100, 17)))
call("put", lambda t: aten.put(t(1031, 17), ids(100), t(100), True))
call("masked_select", lambda t: aten.masked_select(t(1031, 17), ids(1031, 17, dtype=torch.bool)))
call("masked_scatter", lambda t: aten.masked_scatter(t(1031, 17), ids(1031, 17, dtype=torch.bool), t(1031 * 17)))
call("masked_scatter_bc", lambda t: aten.masked_scatter(t(1031, 17), ids(1031, 1, dtype=torch.bool), t(1031 * 17)))
call("masked_fill_bc", lambda t: aten.masked_fill(t(1031, 17), ids(1031, 1, dtype=torch.bool), 0.0))
for _n in (1, 1000, 100000, 5000000):
    call(f"nonzero_{_n}", lambda t, n=_n: aten.nonzero(ids(n, dtype=torch.bool)), F32)
    call(f"nonzero_l_{_n}", lambda t, n=_n: aten.nonzero(ids(n)), F32)
call("nonzero_f", lambda t: aten.nonzero(t(3000, 1033)))
call("nonzero_strided", lambda t: aten.nonzero(t(3000, 1033).t()))
call("argwhere", lambda t: torch.argwhere(t(3000, 1033)))
call("count_nonzero", lambda t: torch.count_nonzero(t(100, 33)))

for _n in (100, 5000, 100000):
    call(f"unique_{_n}", lambda t, n=_n: aten._unique2(ids(n)), F32)
    call(f"unique_inv_{_n}", lambda t, n=_n: aten._unique2(ids(n), True, True, True), F32)
    call(f"unique_consecutive_{_n}", lambda t, n=_n: aten.unique_consecutive(ids(n), True, True), F32)
call("unique_dim", lambda t: aten.unique_dim(ids(100, 7), 0, True, True, True), F32)
call("repeat_interleave", lambda t: aten.repeat_interleave(ids(100), output_size=300), F32)
call("repeat_interleave_n", lambda t: aten.repeat_interleave(ids(100000), output_size=300000), F32)
call("repeat_interleave_self", lambda t: aten.repeat_interleave(t(100, 7), ids(100), 0, output_size=300))
call("repeat_interleave_int", lambda t: aten.repeat_interleave(t(100, 7), 3, 0))
call("repeat_interleave_int1", lambda t: aten.repeat_interleave(t(100, 7), 3, 1))

for _shape in (
    (1,),
    (7, 20),
    (37, 1000),
    (3, 1024),
    (3, 2048),
    (7, 3000),
    (2, 4096),
    (2, 4097),
    (500, 5000),
    (1, 5000),
    (5000,),
    (100000,),
    (1000000,),
    (3, 100000),
    (200, 2000),
    (5, 50000),
    (65, 65, 65),
    (129, 7, 2050),
):
    _label = "x".join(map(str, _shape))
    _types = FLOATS if _shape in ((37, 1000), (500, 5000), (5000,), (1000000,)) else F32
    call(f"sort_{_label}", lambda t, s=_shape: aten.sort(t(*s)), _types)
    call(
        f"sort_stable_{_label}",
        lambda t, s=_shape: aten.sort.stable(t(*s), stable=True, dim=-1, descending=True),
        _types,
    )
    call(f"sort_l_{_label}", lambda t, s=_shape: aten.sort(ids(*s)), F32)
    call(f"argsort_{_label}", lambda t, s=_shape: torch.argsort(t(*s)), _types)
    call(f"msort_{_label}", lambda t, s=_shape: aten.sort(t(*s), 0), _types)
    for _k in (1, 5, 40, 1000, 3000):
        if _k <= _shape[-1]:
            call(f"topk_{_label}_{_k}", lambda t, s=_shape, k=_k: aten.topk(t(*s), k), _types)
            call(f"topk_uns_{_label}_{_k}", lambda t, s=_shape, k=_k: aten.topk(t(*s), k, -1, True, False), F32)
    call(f"topk_first_{_label}", lambda t, s=_shape: aten.topk(t(*s), min(5, s[0]), 0), F32)
    call(f"kthvalue_{_label}", lambda t, s=_shape: aten.kthvalue(t(*s), 1), _types)
    call(f"median_{_label}", lambda t, s=_shape: aten.median(t(*s)), _types)
    call(f"median_dim_{_label}", lambda t, s=_shape: aten.median(t(*s), -1), _types)
    call(f"mode_{_label}", lambda t, s=_shape: aten.mode(t(*s)), F32)
    for _scan in ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"):
        call(f"{_scan}_{_label}", lambda t, s=_shape, o=_scan: getattr(aten, o)(t(*s), -1), _types)
    call(f"cumsum_first_{_label}", lambda t, s=_shape: aten.cumsum(t(*s), 0), F32)
    call(f"cumsum_bool_{_label}", lambda t, s=_shape: aten.cumsum(ids(*s, dtype=torch.bool), -1), F32)
    call(f"cumsum_int_{_label}", lambda t, s=_shape: aten.cumsum(ids(*s, dtype=torch.int), -1, dtype=torch.int), F32)
    call(f"searchsorted_{_label}", lambda t, s=_shape: aten.searchsorted(t(*s), t(*s)), F32)
    call(f"bincount_{_label}", lambda t, s=_shape: aten.bincount(ids(*s).flatten(), None, 10), F32)
    call(f"histc_{_label}", lambda t, s=_shape: aten.histc(t(*s), 50), _types)
call("sort_strided", lambda t: aten.sort(t(1000, 37).t()))
call("sort_strided_1d", lambda t: aten.sort(t(1000, 37)[:, 0]))
call("topk_strided", lambda t: aten.topk(t(1000, 37).t(), 5))
call("cumsum_strided", lambda t: aten.cumsum(t(1000, 37).t(), 1))
call("cumsum_strided_1d", lambda t: aten.cumsum(t(1000, 37)[:, 0], 0))
call("cumsum_", lambda t: aten.cumsum_(t(1000, 37), 0))
call("cumsum_f32", lambda t: aten.cumsum(t(1000, 37), 0, dtype=torch.float32))
call("quantile", lambda t: torch.quantile(t(1000, 37), 0.5), F32)
call("bucketize", lambda t: torch.bucketize(t(1000, 37), t(10)))
call("searchsorted_strided", lambda t: aten.searchsorted(t(37, 1000).t(), t(9, 1000).t()))
call("searchsorted_scalar", lambda t: aten.searchsorted(t(1000), 3.0))
call("one_hot", lambda t: F.one_hot(ids(13, 7), 10), F32)
call("bincount_w", lambda t: aten.bincount(ids(1000), torch.zeros(1000, device="cuda"), 10), F32)
call("bincount_none", lambda t: aten.bincount(ids(1000)), F32)
for _n in (1, 100, 5000, 40000, 300000):
    call(f"randperm_{_n}", lambda t, n=_n: aten.randperm(n, device="cuda"), F32)
    call(f"randperm_int_{_n}", lambda t, n=_n: aten.randperm(n, device="cuda", dtype=torch.int), F32)
call("multinomial", lambda t: aten.multinomial(t(300, 5031), 1))
call("multinomial_1d", lambda t: aten.multinomial(t(1200031), 1))
call("multinomial_rep", lambda t: aten.multinomial(t(300, 5031), 5, True))
call("multinomial_rep1d", lambda t: aten.multinomial(t(1200031), 5, True))
call("multinomial_norep", lambda t: aten.multinomial(t(300, 5031), 5, False))
call("multinomial_big", lambda t: aten.multinomial(t(700, 5031), 1))
call("histc_range", lambda t: aten.histc(t(1000), 50, 0, 1))
call("unfold_bw", lambda t: aten.unfold_backward(t(37, 127, 17, 16), [37, 1024, 17], 1, 16, 8))
call("roll_1", lambda t: aten.roll(t(37, 33, 17), [3], [1]))
call("roll_2", lambda t: aten.roll(t(37, 33, 17), [3, 4], [1, 2]))
call("roll_flat", lambda t: aten.roll(t(37, 33, 17), [3]))
call("roll_strided", lambda t: aten.roll(t(37, 33, 17).transpose(1, 2), [3], [1]))
call("roll_win", lambda t: torch.roll(t(5, 14, 14, 96), (-3, -3), (1, 2)))
call("flip_2", lambda t: aten.flip(t(37, 33, 17), [1, 2]))
call("rot90", lambda t: torch.rot90(t(37, 33, 17), 1, [0, 1]))
call("tril", lambda t: aten.tril(t(37, 33, 17)))
call("tril_", lambda t: aten.tril_(t(37, 33, 17)))
call("tril_strided", lambda t: aten.tril(t(37, 33, 17).transpose(1, 2)))
call("triu__strided", lambda t: aten.triu_(t(37, 33, 17).transpose(1, 2)))
call("tril_indices", lambda t: torch.tril_indices(33, 17, device="cuda"))
call("diag", lambda t: torch.diag(t(37)))
call("diag_embed", lambda t: torch.diag_embed(t(37, 3)))
call("trace", lambda t: torch.trace(t(37, 37)))
call("meshgrid", lambda t: torch.stack(torch.meshgrid(t(37), t(17), indexing="ij")))
call("cartesian", lambda t: torch.combinations(t(7)))
call("isin", lambda t: torch.isin(t(37, 33), t(5)))
call("isin_big", lambda t: torch.isin(t(37, 33), t(500)))
for _n, _v in (
    (3080, 100),
    (3090, 102),
    (3090, 103),
    (20000, 500),
    (20000, 527),
    (20000, 528),
    (20000, 431),
    (20000, 432),
    (20000, 160),
    (20000, 159),
    (20000, 600),
    (20000, 680),
    (200000, 591),
    (200000, 592),
    (200000, 679),
):
    call(
        f"embedding_bw_few_{_n}_{_v}",
        lambda t, n=_n, v=_v: aten.embedding_dense_backward(t(n, 17), ids(n), v, -1, False),
    )
    call(
        f"embedding_bag_bw_few_{_n}_{_v}",
        lambda t, n=_n, v=_v: aten._embedding_bag_dense_backward(
            t(13, 65), ids(n), ids(n), ids(13), ids(13), v, False, 0, None, -1
        ),
    )
for _n in (100000, 1000000):
    for _t in (torch.int, torch.long):
        call(
            f"embedding_bw_scale_{_n}_{str(_t)[6:]}",
            lambda t, n=_n, d=_t: aten.embedding_dense_backward(t(n, 3), ids(n, dtype=d), 100000, -1, True),
            F32,
        )
for _n in (2304, 2305, 4096, 4097, 4608, 4609, 4864, 4865, 30000, 1234567):
    call(f"nonzero_{_n}", lambda t, n=_n: aten.nonzero(ids(n, dtype=torch.bool)), F32)
    call(f"randperm_{_n}", lambda t, n=_n: aten.randperm(n, device="cuda"), F32)
    call(f"embedding_bw_{_n}", lambda t, n=_n: aten.embedding_dense_backward(t(n, 17), ids(n), 70000, -1, False), F32)
    call(
        f"embedding_bwi_{_n}",
        lambda t, n=_n: aten.embedding_dense_backward(t(n, 17), ids(n, dtype=torch.int), 70000, -1, False),
        F32,
    )
    call(f"masked_scatter_{_n}", lambda t, n=_n: aten.masked_scatter(t(n), ids(n, dtype=torch.bool), t(n)))
