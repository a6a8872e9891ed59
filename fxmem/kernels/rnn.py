"""Recurrent layers on cuDNN, and the fused cells of CUDA: sizes, layout of the weights, order of allocations.

Mirrors ``_cudnn_rnn`` and ``_cudnn_rnn_backward`` in aten/src/ATen/native/cudnn/RNN.cpp and
aten/src/ATen/native/cuda/RNN.cu. The weights' layout and size are cuDNN's. **Reserve space and workspace
are not**: cuDNN answers only on a device, so they are the formulas of the phantom
(``cudnnGetRNNTempSpaceSizes``: gate activations, cell state and output of each layer, direction and time step;
gate pre-activations of one layer and 4 MiB), not confirmed by cuDNN (:data:`UNCONFIRMED` says so in reports).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxmem.kernels.reduce import threads_per_sm
from fxmem.kernels.reductions import REDUCTIONS
from fxmem.kernels.steps import Drop, Out, Rule, Step, Take, Target, contiguous, itemsize, nbytes, numel, tensor
from fxmem.tape import Op, Ref, Role, TensorMeta

UNCONFIRMED = (
    "cuDNN RNN: reserve space and workspace are formulas, not cuDNN's own figures, which it gives only on a GPU"
)

LSTM, GRU = 2, 3
"""``cudnnRNNMode_t``; 0 and 1 are plain cells with ReLU and tanh."""

_WORKSPACE = 4 << 20
_DROPOUT_STATE = 48
"""Bytes per thread that the device can hold at a time; the phantom's figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rnn:
    """A stack of recurrent layers, as an ``RNNDescriptor`` has it."""

    mode: int
    input_size: int
    hidden_size: int
    proj_size: int
    """0 without projections."""
    layers: int
    directions: int

    @property
    def gates(self) -> int:
        """Matrices of the hidden size per step."""
        return {LSTM: 4, GRU: 3}.get(self.mode, 1)

    @property
    def output_size(self) -> int:
        """Width of one direction's output."""
        return self.proj_size or self.hidden_size

    @property
    def elements(self) -> int:
        """``cudnnGetRNNWeightSpaceSize`` in elements; biases are always part of it."""
        stacks = self.layers * self.directions
        return sum(self._matrices(i) for i in range(stacks)) + stacks * 2 * self.gates * self.hidden_size

    def _width(self, stack: int) -> int:
        """Width of what goes into pseudo-layer ``stack``."""
        return self.input_size if stack < self.directions else self.output_size * self.directions

    def _matrices(self, stack: int) -> int:
        projection = self.hidden_size * self.proj_size
        return self.gates * self.hidden_size * (self._width(stack) + self.output_size) + projection

    def places(self, *, biases: bool) -> list[tuple[int, tuple[int, ...]]]:
        """``get_parameters``: offset and shape of each parameter in the flat buffer, in the order of the module's.

        cuDNN keeps the matrices of all layers first, then all biases.
        """
        rows = self.gates * self.hidden_size
        stacks = self.layers * self.directions
        bias = sum(self._matrices(i) for i in range(stacks))
        at = 0
        found: list[tuple[int, tuple[int, ...]]] = []
        for i in range(stacks):
            width = self._width(i)
            found += [(at, (rows, width)), (at + rows * width, (rows, self.output_size))]
            if biases:
                found += [(bias, (rows,)), (bias + rows, (rows,))]
            if self.proj_size:
                found.append((at + rows * (width + self.output_size), (self.proj_size, self.hidden_size)))
            at += self._matrices(i)
            bias += 2 * rows
        return found

    def workspace_bytes(self, steps: int, batch: int, dtype: str) -> int:
        """The phantom's formula: gate pre-activations of one layer."""
        return steps * batch * self.hidden_size * self.gates * self.directions * itemsize(dtype) + _WORKSPACE

    def reserve_bytes(self, steps: int, batch: int, dtype: str) -> int:
        """The phantom's formula: what a backward pass needs of each layer, direction and step."""
        kept = self.hidden_size * (self.gates + (2 if self.mode == LSTM else 1))
        return self.layers * self.directions * steps * batch * kept * itemsize(dtype)


def dropout_state_bytes(target: Target) -> int:
    """``cudnnDropoutGetStatesSize``, the phantom's formula."""
    return target.sm_count * threads_per_sm(target.sm) * _DROPOUT_STATE


def extent(shape: Sequence[int], batch_first: bool, batch_sizes: Sequence[int]) -> tuple[int, int]:
    """Time steps and batch of an input (``TensorDescriptorListParams``); a packed one counts padded."""
    if batch_sizes:
        return len(batch_sizes), batch_sizes[0]
    return (shape[1], shape[0]) if batch_first else (shape[0], shape[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What the forward and the backward call have in common."""

    rnn: Rnn
    input: TensorMeta
    batch_first: bool
    batch_sizes: tuple[int, ...]

    @property
    def swapped(self) -> bool:
        """Whether batch and time are exchanged before cuDNN sees the tensors."""
        return self.batch_first and not self.batch_sizes

    @property
    def workspace(self) -> list[Step]:
        """The workspace, taken and not given back."""
        steps, batch = extent(self.input.shape, self.batch_first, self.batch_sizes)
        return [Take("cudnn rnn", self.rnn.workspace_bytes(steps, batch, self.input.dtype), Role.WORKSPACE)]

    def copied(self, key: str, meta: TensorMeta | None) -> list[Step]:
        """``contiguous()`` of an operand, after the exchange."""
        if meta is None:
            return []
        shape, stride = list(meta.shape), list(meta.stride)
        if self.swapped:
            shape[:2], stride[:2] = shape[1::-1], stride[1::-1]
        dense = contiguous(meta._replace(shape=tuple(shape), stride=tuple(stride)))
        return [] if dense else [Take(key, nbytes(meta))]


def _read(op: Op, first: int, batch_sizes: int) -> _Call | None:
    x = tensor(op, 0)
    numbers = op.args[first : first + 5]
    sizes = op.args[batch_sizes]
    if x is None or not all(isinstance(n, int) for n in numbers) or not isinstance(sizes, tuple):
        return None
    mode, hidden, projection, layers, batch_first = (int(n) for n in numbers)  # type: ignore[call-overload]
    rnn = Rnn(
        mode=mode, input_size=x.shape[-1], hidden_size=hidden, proj_size=projection, layers=layers,
        directions=2 if op.args[first + 7] else 1,
    )  # fmt: skip
    return _Call(rnn=rnn, input=x, batch_first=bool(batch_first), batch_sizes=tuple(int(n) for n in sizes))


def _forward(op: Op, target: Target) -> list[Step] | None:
    """``_cudnn_rnn``: a buffer for scattered weights comes before workspace and reserve space."""
    call = _read(op, 6, 14)
    if call is None:
        return None
    return [
        *call.copied("x", call.input), Out(0), Out(1), Out(2), Out(4), *call.workspace, Out(3),
        Drop("cudnn rnn"), Drop("x"),
    ]  # fmt: skip


def _zeros(key: str, given: TensorMeta | None, like: TensorMeta | None) -> list[Step]:
    """A gradient that does not exist is zeros."""
    return [Take(key, nbytes(like))] if given is None and like is not None else []


def _backward(op: Op, target: Target) -> list[Step] | None:
    """``_cudnn_rnn_backward``: first the inputs' gradients, then the weights', each with a workspace."""
    call = _read(op, 10, 18)
    if call is None:
        return None
    hx, cx, output = tensor(op, 4), tensor(op, 5), tensor(op, 6)
    grad_output, grad_hy, grad_cy = tensor(op, 7), tensor(op, 8), tensor(op, 9)
    inputs = 2 if cx is None else 3
    steps: list[Step] = [
        *_zeros("grad output", grad_output, output), *_zeros("grad hy", grad_hy, hx), *_zeros("grad cy", grad_cy, cx),
        *call.copied("x", call.input), *call.copied("dy", grad_output), Out(0), *_dense("dhy", grad_hy),
        *_dense("dcy", grad_cy), Out(1), *([Out(2)] if cx is not None else []), *call.workspace,
        Drop("cudnn rnn"), Drop("dhy"), Drop("dcy"), Drop("dy"), Drop("x"),
    ]  # fmt: skip
    mask = op.args[21]
    if isinstance(mask, tuple) and mask[3]:
        steps += _weight_gradients(op, call, inputs)
    return [*steps, Drop("grad cy"), Drop("grad hy"), Drop("grad output")]


def _dense(key: str, meta: TensorMeta | None) -> list[Step]:
    return [] if meta is None or contiguous(meta) else [Take(key, nbytes(meta))]


def _weight_gradients(op: Op, call: _Call, first: int) -> list[Step]:
    """``_cudnn_rnn_backward_weight``: views of one buffer, or copies where cuDNN has more parameters."""
    gradients = [Out(i) for i in range(first, len(op.outputs))]
    shared = len({op.outputs[g.position].storage for g in gradients}) == 1
    buffer: list[Step] = [gradients[0]] if shared else [Take("dw", call.rnn.elements * itemsize(call.input.dtype))]
    copies: list[Step] = [] if shared else [*gradients]
    return [*call.copied("x", call.input), *buffer, *call.workspace, *copies, Drop("cudnn rnn"), Drop("dw"), Drop("x")]


# ------------------------------------------------------------------ cells
def _lstm_cell(op: Op, target: Target) -> list[Step]:
    """``_thnn_fused_lstm_cell_cuda``: the workspace first."""
    return [Out(2), Out(0), Out(1)]


def _gru_cell(op: Op, target: Target) -> list[Step]:
    """``_thnn_fused_gru_cell_cuda``: the workspace first."""
    return [Out(1), Out(0)]


def _lstm_cell_backward(op: Op, target: Target) -> list[Step]:
    """``_thnn_fused_lstm_cell_backward_impl_cuda``: the bias's gradient is a sum over the batch."""
    return [Out(0), Out(1), *_bias(op, 0, 2, target)]


def _gru_cell_backward(op: Op, target: Target) -> list[Step]:
    """``_thnn_fused_gru_cell_backward_cuda``."""
    return [Out(0), Out(1), Out(2), *_bias(op, 0, 3, target), *_bias(op, 1, 4, target)]


def _bias(op: Op, gates: int, result: int, target: Target) -> list[Step]:
    """``grad_gates.sum(0)`` of result ``gates`` into result ``result``."""
    rule = REDUCTIONS.get("sum.dim_IntList")
    if result >= len(op.outputs):
        return []
    source = op.outputs[gates]
    if rule is None or not numel(source):
        return [Out(result)]
    total = replace(
        op, name="sum.dim_IntList", inputs=(source,), outputs=(op.outputs[result],), args=(Ref(0), (0,)), kwargs=()
    )
    found = rule(total, target)
    return [Out(result) if isinstance(step, Out) else step for step in found] if found else [Out(result)]


RNN: dict[str, Rule] = {
    "_cudnn_rnn.default": _forward,
    "_cudnn_rnn_backward.default": _backward,
    "_thnn_fused_lstm_cell.default": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl.default": _lstm_cell_backward,
    "_thnn_fused_gru_cell.default": _gru_cell,
    "_thnn_fused_gru_cell_backward.default": _gru_cell_backward,
}
