"""More programs for the kernel probe: recurrent layers, cells and packed sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from kernel_probe import program
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence

AMP = (torch.float16, torch.bfloat16)
ALL = (torch.float32, torch.float16, torch.bfloat16)
KINDS = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}


def net(name, make, shape=(33, 5, 96), train=True, use=None, dtypes=ALL, amp=(torch.float16,), grad=True):
    def f(t):
        m = make().to(device="cuda", dtype=t.dtype).train(train)
        x = t(*shape, grad=grad and train)
        if not train:
            with torch.no_grad():
                return (use or (lambda m, x, t: m(x)[0]))(m, x, t)
        return (use or (lambda m, x, t: m(x)[0]))(m, x, t)

    f.__name__ = "rx_" + name
    program(dtypes=dtypes, amp=amp)(f)


for _n, _k in KINDS.items():
    net(f"{_n}", lambda k=_k: k(96, 64), amp=AMP)
    net(f"{_n}_three", lambda k=_k: k(96, 64, 3, bidirectional=True))
    net(f"{_n}_nobias", lambda k=_k: k(96, 64, 2, bias=False))
    net(f"{_n}_bf", lambda k=_k: k(96, 64, 2, batch_first=True), (5, 33, 96))
    net(f"{_n}_bf_eval", lambda k=_k: k(96, 64, 2, batch_first=True), (5, 33, 96), train=False, amp=AMP)
    net(f"{_n}_nobias_eval", lambda k=_k: k(96, 64, 2, bias=False), train=False)
    net(f"{_n}_dropout_bi", lambda k=_k: k(96, 64, 2, dropout=0.2, bidirectional=True))
    net(f"{_n}_no_input_grad", lambda k=_k: k(96, 64, 2), grad=False)
    net(f"{_n}_unbatched", lambda k=_k: k(96, 64, 2), (33, 96))
    net(f"{_n}_transposed", lambda k=_k: k(96, 64), (5, 33, 96), use=lambda m, x, t: m(x.transpose(0, 1))[0])
    net(f"{_n}_sliced", lambda k=_k: k(96, 64), (33, 5, 192), use=lambda m, x, t: m(x[..., :96])[0])
    net(f"{_n}_last", lambda k=_k: k(96, 64, batch_first=True), (5, 33, 96), use=lambda m, x, t: m(x)[0][:, -1])
    net(f"{_n}_flatten", lambda k=_k: k(96, 64), use=lambda m, x, t: (m.flatten_parameters(), m(x)[0])[1])
    net(f"{_n}_twice", lambda k=_k: k(96, 64), use=lambda m, x, t: m(x)[0] + m(x)[0])
    net(f"{_n}_frozen", lambda k=_k: k(96, 64).requires_grad_(False))
    net(f"{_n}_float64", lambda k=_k: k(96, 64), dtypes=(torch.float64,), amp=())
net("rnn_relu", lambda: nn.RNN(96, 64, nonlinearity="relu"))
net("lstm_proj", lambda: nn.LSTM(96, 64, 2, proj_size=32))
net("lstm_proj_bi", lambda: nn.LSTM(96, 64, 2, proj_size=32, bidirectional=True, batch_first=True), (5, 33, 96))
net("lstm_proj_nobias", lambda: nn.LSTM(96, 64, 2, proj_size=32, bias=False))
net("lstm_hidden", lambda: nn.LSTM(96, 64, 2), use=lambda m, x, t: m(x)[1][0])
net("lstm_cell_state", lambda: nn.LSTM(96, 64, 2), use=lambda m, x, t: m(x)[1][1])
net("gru_hidden", lambda: nn.GRU(96, 64, 2), use=lambda m, x, t: m(x)[1])
net("gru_both", lambda: nn.GRU(96, 64, 2), use=lambda m, x, t: (lambda y, h: y[-1] + h[-1])(*m(x)))
net("gru_state", lambda: nn.GRU(96, 64, 2), use=lambda m, x, t: m(x, t(2, 5, 64, grad=True))[0])
net("lstm_state", lambda: nn.LSTM(96, 64, 2), use=lambda m, x, t: m(x, (t(2, 5, 64, grad=True), t(2, 5, 64)))[0])


class Stacked(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.a, self.b = nn.LSTM(96, 64, bias=bias), nn.GRU(64, 48, bidirectional=True)
        self.out = nn.Linear(96, 13)

    def forward(self, x):
        return (self.out(self.b(self.a(x)[0])[0]),)


net("stacked", Stacked, amp=AMP)
net("stacked_sum", Stacked, use=lambda m, x, t: m(x)[0].sum(), amp=AMP)


def _loop(optimizer):
    def use(m, x, t):
        o = optimizer(m.parameters())
        for _ in range(3):
            m(x)[0].float().pow(2).mean().backward()
            o.step()
            o.zero_grad()

    return use


net("loop_adam", lambda: nn.LSTM(96, 64, 2), use=_loop(lambda p: torch.optim.Adam(p)))
net(
    "loop_sgd_fused",
    lambda: nn.GRU(96, 64, 2),
    use=_loop(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True)),
)
net("loop_adamw_bi", lambda: nn.LSTM(96, 64, 1, bidirectional=True), use=_loop(lambda p: torch.optim.AdamW(p)))


def cell(name, make, use=None, **kw):
    def steps(m, x, t):
        h = None
        for i in range(3):
            h = m(x[i], h)
        return h[0] if isinstance(h, tuple) else h

    net(name, make, use=use or steps, amp=AMP, **kw)


cell("lstmcell", lambda: nn.LSTMCell(96, 64))
cell("lstmcell_nobias", lambda: nn.LSTMCell(96, 64, bias=False))
cell("lstmcell_eval", lambda: nn.LSTMCell(96, 64), train=False)
cell("lstmcell_c", lambda: nn.LSTMCell(96, 64), use=lambda m, x, t: m(x[0])[1])
cell("grucell", lambda: nn.GRUCell(96, 64))
cell("grucell_nobias", lambda: nn.GRUCell(96, 64, bias=False))
cell("grucell_eval", lambda: nn.GRUCell(96, 64), train=False)
cell("rnncell", lambda: nn.RNNCell(96, 64))
cell("rnncell_relu", lambda: nn.RNNCell(96, 64, nonlinearity="relu"))
cell("lstmcell_large", lambda: nn.LSTMCell(96, 64), shape=(3, 3001, 96))
cell("grucell_large", lambda: nn.GRUCell(96, 64), shape=(3, 3001, 96))


def packed(name, make, shape=(5, 33, 96), lengths=(33, 30, 30, 7, 1), first=True, sort=True, use=None, **kw):
    def run(m, x, t):
        p = pack_padded_sequence(x, torch.tensor(lengths), batch_first=first, enforce_sorted=sort)
        y, h = m(p)
        if use:
            return use(y, h)
        return pad_packed_sequence(y, batch_first=first)[0]

    net(name, make, shape, use=run, **kw)


packed("packed_lstm", lambda: nn.LSTM(96, 64, 2, bidirectional=True, batch_first=True), amp=AMP)
packed("packed_lstm_seq", lambda: nn.LSTM(96, 64), (33, 5, 96), first=False)
packed("packed_gru", lambda: nn.GRU(96, 64, batch_first=True))
packed("packed_rnn", lambda: nn.RNN(96, 64, batch_first=True))
packed("packed_gru_unsorted", lambda: nn.GRU(96, 64, batch_first=True), lengths=(7, 33, 1, 30, 30), sort=False)
packed("packed_lstm_unsorted", lambda: nn.LSTM(96, 64, batch_first=True), lengths=(7, 33, 1, 30, 30), sort=False)
packed("packed_lstm_hidden", lambda: nn.LSTM(96, 64, batch_first=True), use=lambda y, h: h[0])
packed(
    "packed_lstm_hidden_uns",
    lambda: nn.LSTM(96, 64, batch_first=True),
    lengths=(7, 33, 1, 30, 30),
    sort=False,
    use=lambda y, h: h[0],
)
packed("packed_lstm_eval", lambda: nn.LSTM(96, 64, 2, batch_first=True), train=False)
packed("packed_equal", lambda: nn.LSTM(96, 64, batch_first=True), lengths=(33,) * 5)
packed("packed_equal_seq", lambda: nn.LSTM(96, 64), (33, 5, 96), lengths=(33,) * 5, first=False)
packed(
    "packed_total",
    lambda: nn.LSTM(96, 64, batch_first=True),
    lengths=(30, 30, 20, 7, 1),
    use=lambda y, h: pad_packed_sequence(y, batch_first=True, total_length=33)[0],
)


@program(dtypes=(torch.float32,))
def rx_pack_sequence(t):
    m = nn.GRU(96, 64).to("cuda")
    xs = [t(n, 96, grad=True) for n in (20, 11, 5)]
    return m(pack_sequence(xs))[0].data


@program(dtypes=(torch.float32,))
def rx_pad_sequence(t):
    return pad_sequence([t(n, 96, grad=True) for n in (20, 11, 5)], batch_first=True)


@program(dtypes=(torch.float32,))
def rx_tagger(t):
    emb, rnn, out = (
        nn.Embedding(200, 96, device="cuda"),
        nn.LSTM(96, 64, 2, bidirectional=True, batch_first=True).cuda(),
        nn.Linear(128, 17, device="cuda"),
    )
    x = pack_padded_sequence(
        emb(t.ids(200, 5, 33)), torch.tensor([7, 33, 1, 30, 30]), batch_first=True, enforce_sorted=False
    )
    y, _ = pad_packed_sequence(rnn(x)[0], batch_first=True, total_length=33)
    return F.cross_entropy(out(y).flatten(0, 1), t.ids(17, 5 * 33))
