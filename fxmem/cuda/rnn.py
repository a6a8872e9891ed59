"""Recurrent layers as CUDA runs them: on cuDNN, with the weights in one flat buffer; cells fused.

The CPU has kernels of its own for ``lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu``. On CUDA these call
``_cudnn_rnn`` (``_cudnn_impl`` in aten/src/ATen/native/cudnn/RNN.cpp), under autocast after a cast of all
weights into a new flat buffer (aten/src/ATen/cudnn/AutocastRNN.cpp). Moving a module to the device packs its
parameters (``RNNBase.flatten_parameters``). Sizes are in :mod:`fxmem.kernels.rnn`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxmem.cuda.autocast import Autocast
from fxmem.cuda.places import replaced
from fxmem.device import Device
from fxmem.kernels.rnn import GRU, LSTM, UNCONFIRMED, Rnn, dropout_state_bytes
from fxmem.kernels.steps import Target
from fxmem.recording.ledger import HOST
from fxmem.recording.recorder import Recorder
from fxmem.recording.shapes.rnn import CPU_KERNELS
from fxmem.tape import Role

aten = torch.ops.aten

_RELU, _TANH = 0, 1
_ON_CUDNN = (torch.float16, torch.float32, torch.float64)
_FLATTENED = _ON_CUDNN
"""``CUDNN_TENSOR_DTYPES`` of torch/backends/cudnn/__init__.py: bfloat16 weights stay scattered."""

_WITHOUT_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layers:
    """What the four operators have in common."""

    hx: Tensor
    cx: Tensor | None
    params: Sequence[Tensor]
    biases: bool
    mode: int
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool
    batch_sizes: Sequence[int]

    def rnn(self, input_size: int) -> Rnn:
        """Sizes; with projections the cell is wider than the hidden state."""
        hidden = self.hx.shape[2]
        wide = self.cx is not None and self.cx.shape[2] != hidden
        return Rnn(
            mode=self.mode, input_size=input_size, proj_size=hidden if wide else 0, layers=self.layers,
            hidden_size=self.cx.shape[2] if wide and self.cx is not None else hidden,
            directions=2 if self.bidirectional else 1,
        )  # fmt: skip


class CudnnRnn:
    """The operators for one run. Holds the dropout state, which cuDNN makes once and keeps.

    Args:
        recorder: Knows which tensors are on the device.
        target: The GPU.
        autocast: Casts as autocast does.
    """

    def __init__(self, recorder: Recorder, target: Target, autocast: Autocast) -> None:
        self.recorder = recorder
        self.target = target
        self.autocast = autocast
        self._dropout_state: Tensor | None = None

    # ------------------------------------------------------------- operators
    def kernels(self, *, casts: bool) -> dict[str, Callable[..., Any]]:
        """Operator name to kernel, with or without autocast's casts."""
        table: dict[str, Callable[..., Any]] = {
            "lstm.input": self._lstm(casts, packed=False),
            "lstm.data": self._lstm(casts, packed=True),
        }
        for name, mode in (("gru", GRU), ("rnn_tanh", _TANH), ("rnn_relu", _RELU)):
            table[f"{name}.input"] = self._plain(name, mode, casts, packed=False)
            table[f"{name}.data"] = self._plain(name, mode, casts, packed=True)
        return table

    def _lstm(self, casts: bool, *, packed: bool) -> Callable[..., Any]:
        """``lstm``: the states come as a list of two."""
        op = aten.lstm.data if packed else aten.lstm.input

        def call(x: Tensor, *args: Any) -> Any:
            if not self._on_cudnn(x):
                return self._elsewhere(op, x, args)
            sizes, (hx, params, biases, layers, dropout, train, both, *first) = self._sizes(args, packed)
            spec = _Layers(
                hx=hx[0], cx=hx[1], params=params, biases=biases, mode=LSTM, layers=layers, dropout=dropout,
                train=train, bidirectional=both, batch_first=bool(first and first[0]), batch_sizes=sizes,
            )  # fmt: skip
            return self._run(x, spec, casts)[:3]

        return _without_autocast(call) if casts else call

    def _plain(self, name: str, mode: int, casts: bool, *, packed: bool) -> Callable[..., Any]:
        """``gru``, ``rnn_tanh``, ``rnn_relu``: one state."""
        op = getattr(getattr(aten, name), "data" if packed else "input")

        def call(x: Tensor, *args: Any) -> Any:
            if not self._on_cudnn(x):
                return self._elsewhere(op, x, args)
            sizes, (hx, params, biases, layers, dropout, train, both, *first) = self._sizes(args, packed)
            spec = _Layers(
                hx=hx, cx=None, params=params, biases=biases, mode=mode, layers=layers, dropout=dropout,
                train=train, bidirectional=both, batch_first=bool(first and first[0]), batch_sizes=sizes,
            )  # fmt: skip
            return self._run(x, spec, casts)[:2]

        return _without_autocast(call) if casts else call

    def _elsewhere(self, op: Any, x: Tensor, args: tuple[Any, ...]) -> Any:
        """Host tensors, and what cuDNN does not take (bfloat16 before sm_80, ``torch.backends.cudnn.enabled``)."""
        if self.recorder.on_device(x):
            name = op.overloadpacket.__name__
            self.recorder.notes[f"{name} without cuDNN: its steps are counted as the CPU takes them"] = None
        return op.decompose(x, *args)

    @staticmethod
    def _sizes(args: tuple[Any, ...], packed: bool) -> tuple[list[int], tuple[Any, ...]]:
        return (args[0].tolist(), args[1:]) if packed else ([], args)

    def _on_cudnn(self, x: Tensor) -> bool:
        """``use_cudnn`` in aten/src/ATen/native/RNN.cpp."""
        half = x.dtype is torch.bfloat16 and self.target.sm >= 80
        usable = torch.backends.cudnn.enabled and (x.dtype in _ON_CUDNN or half)
        return usable and x.numel() > 0 and self.recorder.on_device(x)

    def _run(self, x: Tensor, spec: _Layers, casts: bool) -> tuple[Tensor, ...]:
        """``_cudnn_impl``; with casts ``_cudnn_rnn_cast_reflatten`` on top."""
        self.recorder.notes[UNCONFIRMED] = None
        rnn = spec.rnn(x.shape[-1])
        per_layer = (4 if spec.biases else 2) + (1 if rnn.proj_size else 0)
        buffer = _flat_buffer(spec.params, rnn, spec.biases)
        params, hx, cx = spec.params, spec.hx, spec.cx
        state = self._state() if spec.train and spec.dropout > 0 else self._dropout_state
        if casts:
            if params[0].is_floating_point() and params[0].dtype not in (torch.float16, torch.float64):
                buffer, params = _cast_and_flatten(params, rnn, spec.biases)
            cx = None if cx is None else self.autocast.cast(cx, torch.float16)
            hx = self.autocast.cast(hx, torch.float16)
            x = self.autocast.cast(x, torch.float16)
        result: tuple[Tensor, ...] = aten._cudnn_rnn(
            x, params, per_layer, buffer, hx, cx, spec.mode, rnn.hidden_size, rnn.proj_size, spec.layers,
            spec.batch_first, spec.dropout, spec.train, spec.bidirectional, spec.batch_sizes, state,
        )  # fmt: skip
        return result

    def _state(self) -> Tensor:
        """``get_dropout_state``: drawn with a seed at the first use, then kept."""
        if self._dropout_state is None:
            seed = torch.empty((), dtype=torch.int64)
            del seed
            self._dropout_state = torch.empty(dropout_state_bytes(self.target), dtype=torch.uint8)
            self._owned(self._dropout_state, Role.WORKSPACE, "cudnn dropout state")
        return self._dropout_state

    def _owned(self, tensor: Tensor, role: Role, name: str) -> None:
        sid = self.recorder.ledger.index(tensor)
        if sid != HOST:
            note = self.recorder.storages[sid]
            note.role, note.name = role, name

    # ------------------------------------------------------------- packing
    def flatten_parameters(self, module: nn.RNNBase) -> None:
        """``RNNBase.flatten_parameters`` and ``_cudnn_rnn_flatten_weight``: parameters become views of one buffer."""
        weights: list[Any] = module._flat_weights
        if len(weights) != len(module._flat_weights_names) or not all(isinstance(w, Tensor) for w in weights):
            return
        dtype = weights[0].dtype
        if dtype not in _FLATTENED or not torch.backends.cudnn.enabled:
            return
        if any(w.dtype is not dtype or not self.recorder.on_device(w) for w in weights):
            return
        if len({(w.untyped_storage()._cdata, w.storage_offset()) for w in weights}) != len(weights):
            return
        rnn = Rnn(
            mode={"LSTM": LSTM, "GRU": GRU, "RNN_TANH": _TANH, "RNN_RELU": _RELU}[module.mode],
            input_size=module.input_size, hidden_size=module.hidden_size, proj_size=module.proj_size,
            layers=module.num_layers, directions=2 if module.bidirectional else 1,
        )  # fmt: skip
        with torch.no_grad():
            buffer = weights[0].new_zeros(rnn.elements)
            if type(buffer) is not type(weights[0].data) and isinstance(buffer, torch._subclasses.FakeTensor):
                return  # real parameters cannot become views of a fake buffer
            self._owned(buffer, Role.PARAMETER, "flat_weights")
            for weight, (offset, shape) in zip(weights, rnn.places(biases=module.bias), strict=True):
                place = buffer.as_strided(shape, _dense_strides(shape), offset)
                place.copy_(weight)
                weight.data = place


def _without_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_WITHOUT_AUTOCAST):
            return call(*args)

    return kernel


def _dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[1], 1) if len(shape) == 2 else (1,)


def _flat_buffer(params: Sequence[Tensor], rnn: Rnn, biases: bool) -> Tensor | None:
    """``try_get_weight_buf``: the parameters' common storage, if each lies where cuDNN expects it."""
    first = params[0]
    storage = first.untyped_storage()
    if storage.nbytes() < rnn.elements * first.element_size() or not params[-1].is_contiguous():
        return None
    for param, (offset, _) in zip(params, rnn.places(biases=biases), strict=True):
        if param.untyped_storage()._cdata != storage._cdata or param.storage_offset() != offset:
            return None
    with torch.no_grad():
        return first.detach().as_strided((rnn.elements,), (1,), 0)


def _cast_and_flatten(params: Sequence[Tensor], rnn: Rnn, biases: bool) -> tuple[Tensor, list[Tensor]]:
    """``copy_weights_to_flat_buf_views`` to half precision, seen by autograd: each copy is a node of its own."""
    buffer = params[0].new_zeros(rnn.elements, dtype=torch.float16)
    views = []
    for param, (offset, shape) in zip(params, rnn.places(biases=biases), strict=True):
        view = buffer.as_strided(shape, _dense_strides(shape), offset).detach()
        view.copy_(param.view_as(view))
        views.append(view)
    return buffer, views


# ------------------------------------------------------------------ cells
def _lstm_cell(
    x: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``LSTMCell`` in aten/src/ATen/native/RNN.cpp, its branch for CUDA."""
    gates = torch.matmul(x, w_ih.t())
    hidden = torch.matmul(hx[0], w_hh.t())
    hy, cy, _ = aten._thnn_fused_lstm_cell(gates, hidden, hx[1], b_ih, b_hh)
    return hy, cy


def _gru_cell(
    x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """``GRUCell`` in aten/src/ATen/native/RNN.cpp, its branch for CUDA."""
    gates = torch.matmul(x, w_ih.t())
    hidden = torch.matmul(hx, w_hh.t())
    hy: Tensor = aten._thnn_fused_gru_cell(gates, hidden, hx, b_ih, b_hh)[0]
    return hy


# ------------------------------------------------------------------ packed sequences
class _Pack(torch.autograd.Function):
    """``_pack_padded_sequence`` (aten/src/ATen/native/PackedSequence.cpp), whose lengths are known on the host."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: list[int], batch_sizes: Tensor, batch_first: bool) -> Tensor:
        ctx.shape, ctx.batch_sizes, ctx.batch_first = tuple(x.shape), batch_sizes, batch_first
        steps_first = x.transpose(0, 1) if batch_first else x
        blocks = []
        before = 0
        for i, length in enumerate(reversed(lengths)):
            if length > before:
                block = steps_first[before:length, : len(lengths) - i]
                blocks.append(block.contiguous().view(-1, *x.shape[2:]))
                before = length
        return torch.cat(blocks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        made = aten._pack_padded_sequence_backward(grad, ctx.shape, ctx.batch_sizes, ctx.batch_first)
        return made, None, None, None


class _Packing:
    """Packed sequences: lengths and batch sizes are host tensors.

    Args:
        recorder: Is told so.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """Operator name to kernel."""
        return {"_pack_padded_sequence": self._pack, "_pad_packed_sequence": self._pad}

    def _on_host(self, numbers: list[int]) -> Tensor:
        before = self.recorder.place
        self.recorder.place = False
        try:
            return torch.tensor(numbers)
        finally:
            self.recorder.place = before

    def _pack(self, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        known = [int(n) for n in lengths.tolist()]
        if sorted(known, reverse=True) != known:
            raise RuntimeError(
                "`lengths` array must be sorted in decreasing order when `enforce_sorted` is True. "
                "You can pass `enforce_sorted=False` to pack_padded_sequence"
            )
        if known[-1] <= 0:
            raise RuntimeError("Length of all samples has to be greater than 0")
        batch_sizes = self._on_host([sum(n > t for n in known) for t in range(known[0])])
        return _Pack.apply(x, known, batch_sizes, batch_first), batch_sizes

    def _pad(
        self, data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
    ) -> tuple[Tensor, Tensor]:
        sizes = [int(n) for n in batch_sizes.tolist()]
        if 0 < total_length < len(sizes):
            raise RuntimeError("Expected total_length to be at least the length of the longest sequence in input")
        shape = (max(total_length, len(sizes)), sizes[0], *data.shape[1:])
        output = torch.full(shape, padding_value, dtype=data.dtype)
        at = start = 0
        for step in range(1, len(sizes) + 1):
            rows = sizes[start]
            if step == len(sizes) or sizes[step] != rows:
                block = data[at : at + rows * (step - start)]
                output[start:step, :rows].copy_(block.view(step - start, rows, *data.shape[1:]))
                at += rows * (step - start)
                start = step
        lengths = self._on_host([sum(n > i for n in sizes) for i in range(sizes[0])])
        return output.transpose(0, 1) if batch_first else output, lengths


# ------------------------------------------------------------------ scope
@contextlib.contextmanager
def cuda_rnn(recorder: Recorder, device: Device, autocast: Autocast) -> Iterator[None]:
    """Run recurrent layers as on ``device`` while inside."""
    target = Target(sm=int(device.arch.removeprefix("sm_").rstrip("af")), sm_count=device.sm_count or 1)
    cudnn = CudnnRnn(recorder, target, autocast)
    library = torch.library.Library("aten", "IMPL")
    patch = [(nn.RNNBase, "flatten_parameters", lambda module: cudnn.flatten_parameters(module))]  # noqa: PLW0108 - a method of its own
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "overriding a previously registered kernel": meant
            for key, table in (
                ("AutogradCPU", cudnn.kernels(casts=False)), ("AutocastCPU", cudnn.kernels(casts=True)),
                ("AutogradCPU", {"lstm_cell": _lstm_cell, "gru_cell": _gru_cell}),
                ("AutogradCPU", _Packing(recorder).kernels()), ("CPU", CPU_KERNELS),
            ):  # fmt: skip
                for name, kernel in table.items():
                    library.impl(name, kernel, key)
        with replaced(patch):
            yield
    finally:
        library._destroy()
