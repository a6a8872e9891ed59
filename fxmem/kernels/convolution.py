"""Convolutions: the copies that make operands dense, and the order of results, per backend.

The caller of cuDNN's products is aten/src/ATen/native/cudnn/ConvShared.cpp; the choice of a
backend and what is done around it are aten/src/ATen/native/Convolution.cpp. Workspaces come
from outside: see :func:`convolution_steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fxmem.kernels.conv_slow import slow_backward, slow_forward
from fxmem.kernels.conv_workspace import questions, workspace_steps
from fxmem.kernels.copies import copies, copy, dense, drops, formatted
from fxmem.kernels.reductions import reduce_steps, summing
from fxmem.kernels.steps import Out, Rule, Step, Take, Target, nbytes, numel, suggests_channels_last, tensor
from fxmem.tape import Op, TensorMeta

Workspaces = Sequence[Sequence[Step]]
"""Per product that cuDNN computes, in order: what it takes and gives back."""


def convolution_steps(op: Op, target: Target, workspaces: Workspaces = ()) -> list[Step] | None:
    """``_convolution`` and ``convolution_backward`` of aten/src/ATen/native/Convolution.cpp.

    Args:
        op: ``convolution`` or ``convolution_backward``.
        target: The GPU.
        workspaces: Steps that go with the products of :func:`fxmem.kernels.conv_workspace.questions`,
            in its order; none where nothing is known.
    """
    backward = op.name == "convolution_backward.default"
    first = 1 if backward else 0
    x, weight = tensor(op, first), tensor(op, first + 1)
    grad = tensor(op, 0) if backward else None
    if x is None or weight is None or not op.outputs or not numel(x) or (backward and grad is None):
        return None
    call = _Call(op, target, x, weight, grad, list(workspaces))
    return call.backward() if backward else call.forward()


def _nhwc(a: TensorMeta, b: TensorMeta) -> bool:
    """``cudnn_conv_suggest_memory_format`` of aten/src/ATen/native/ConvUtils.h."""
    if "float64" in (a.dtype, b.dtype):
        return False
    return suggests_channels_last(a) or suggests_channels_last(b)


def _view4d(meta: TensorMeta) -> TensorMeta:
    """``unsqueeze(2)``."""
    n, c, length = meta.shape
    stride = (*meta.stride[:2], meta.stride[2] * length, meta.stride[2])
    return meta._replace(shape=(n, c, 1, length), stride=stride)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call; never leaves :func:`convolution_steps`."""

    op: Op
    target: Target
    x: TensorMeta
    weight: TensorMeta
    grad: TensorMeta | None
    workspaces: list[Sequence[Step]]

    # ------------------------------------------------------------- forward
    def forward(self) -> list[Step]:
        """``_convolution``: a 1-D input and what cuDNN reads is made dense first; the bias is added in place."""
        before: list[Step] = []
        x, weight = self.x, self.weight
        if len(weight.shape) == 3:
            before, x, weight = copy("x 1d", x), _view4d(formatted(x)), _view4d(weight)
        if self._cudnn():
            nhwc = _nhwc(x, weight)
            before += copy("x", x, nhwc=nhwc)
            return before + self._product(0, formatted(x, nhwc=nhwc), weight, nhwc)
        before += copy("x", x)
        if self._depthwise():
            return [*before, *self._depthwise_forward()]
        return before + slow_forward(self.op, formatted(x), weight, self.target)

    def _depthwise_forward(self) -> list[Step]:
        """``conv_depthwise2d_cuda_out`` (DepthwiseConv2d.cu), ``conv_depthwise3d_cuda`` (DepthwiseConv3d.cu)."""
        taken = copy("weight", self.weight)
        return [Out(0), *taken] if len(self.weight.shape) == 5 else [*taken, Out(0)]

    def _product(self, out: int, source: TensorMeta, weight: TensorMeta, nhwc: bool) -> list[Step]:
        """``cudnn_convolution_forward_out`` and ``cudnn_convolution_backward_input`` (ConvShared.cpp)."""
        taken = copy("weight copy", weight, nhwc=nhwc) + copy("source copy", source, nhwc=nhwc)
        return [Out(out), *taken, *self._workspace(), *drops(taken)]

    def _workspace(self) -> Sequence[Step]:
        return self.workspaces.pop(0) if self.workspaces else ()

    # ------------------------------------------------------------- backward
    def backward(self) -> list[Step]:
        """``convolution_backward``: the gradient of the bias is a sum that comes last."""
        assert self.grad is not None
        before: list[Step] = []
        x, weight, grad = self.x, self.weight, self.grad
        if len(weight.shape) == 3:
            before, x = copy("x 1d", x), _view4d(formatted(x))
            weight, grad = _view4d(weight), _view4d(grad)
        if self._cudnn():
            steps = self._cudnn_backward(x, weight, grad)
        elif self._depthwise():
            steps = (_depthwise3d if len(weight.shape) == 5 else _depthwise2d)(self, x, weight, grad)
        else:
            steps = slow_backward(self.op, (x, weight, grad), self._mask(), self._bias(grad), self.target)
            return before + steps
        return before + steps + self._bias(grad)

    def wanted(self) -> tuple[bool, bool]:
        """Which of the gradients of input and weight are asked for."""
        mask = self._mask()
        return mask[0], mask[1]

    def out(self, index: int) -> Out:
        """Result ``index`` of three; those that are not asked for are not among the operator's results."""
        return Out(sum(self._mask()[:index]))

    def _mask(self) -> tuple[bool, ...]:
        mask = self.op.args[10]
        assert isinstance(mask, Sequence)
        return tuple(bool(m) for m in mask)

    def _cudnn_backward(self, x: TensorMeta, weight: TensorMeta, grad: TensorMeta) -> list[Step]:
        """``cudnn_convolution_backward`` and its twin for transposed convolutions (ConvShared.cpp)."""
        transposed = bool(self.op.args[7])
        data, filters = self.wanted()
        steps: list[Step] = []
        if filters:
            nhwc = _nhwc(x, weight)
            steps, x = copy("x", x, nhwc=nhwc), formatted(x, nhwc=nhwc)
        nhwc = suggests_channels_last(x)
        copied = copies(grad, nhwc=nhwc) if transposed else suggests_channels_last(grad) != nhwc
        if copied:
            steps += [Take("grad", nbytes(grad))]
            grad = dense(grad, nhwc=nhwc)
        if data:
            steps += self._product(self.out(0).position, grad, weight, _nhwc(grad, weight))
        if filters:
            steps += self._filters(x, grad, transposed=transposed)
        return [*steps, *drops(steps)]

    def _filters(self, x: TensorMeta, grad: TensorMeta, *, transposed: bool) -> list[Step]:
        """``cudnn_convolution_backward_weight``; with the two tensors exchanged where it is transposed."""
        nhwc = _nhwc(x, grad)
        first, second = (x, grad) if transposed else (grad, x)
        taken = copy("first", first, nhwc=nhwc) + copy("second", second, nhwc=nhwc)
        return [*taken, self.out(1), *self._workspace(), *drops(taken)]

    def _bias(self, grad: TensorMeta) -> list[Step]:
        if not self._mask()[2]:
            return []
        out = self.out(2)
        dims = (0, *range(2, len(grad.shape)))
        return [out, *reduce_steps(grad, (self.op.outputs[out.position],), dims, summing, self.target)]

    # ------------------------------------------------------------- backend
    def _cudnn(self) -> bool:
        """Whether ``_select_conv_backend`` takes cuDNN."""
        op = self.op
        whole = replace(op, args=(*op.args[:10], (True, True, True))) if self.grad is not None else op
        return bool(questions(whole, self.target))

    def _depthwise(self) -> bool:
        """``is_depthwise``."""
        at = 7 if self.grad is not None else 6
        groups, channels = self.op.args[at + 2], self.x.shape[1]
        own = not self.op.args[at] and groups == channels and groups != 1
        return own and self.weight.shape[0] % channels == 0


def _depthwise2d(call: _Call, x: TensorMeta, weight: TensorMeta, grad: TensorMeta) -> list[Step]:
    """``conv_depthwise2d_backward_cuda`` (DepthwiseConv2d.cu): the weight's gradient comes first."""
    data, filters = call.wanted()
    held = copy("grad", grad)
    steps = list(held)
    if filters:
        taken = copy("x", x)
        steps += [*taken, call.out(1), *drops(taken)]
    if data:
        taken = copy("weight", weight)
        steps += [*taken, call.out(0), *drops(taken)]
    return [*steps, *drops(held)]


def _depthwise3d(call: _Call, x: TensorMeta, weight: TensorMeta, grad: TensorMeta) -> list[Step]:
    """``conv_depthwise3d_backward_cuda`` (DepthwiseConv3d.cu): results first, then copies; the gradient's is held."""
    data, filters = call.wanted()
    steps: list[Step] = [call.out(i) for i, asked in enumerate((data, filters)) if asked]
    steps += copy("grad", grad)
    taken = (copy("weight", weight) if data else []) + (copy("x", x) if filters else [])
    return [*steps, *taken, *drops(taken)]


def _convolution(op: Op, target: Target) -> list[Step] | None:
    """With cuDNN's workspaces where they are asked for."""
    ask = target.workspaces
    return convolution_steps(op, target, workspace_steps(op, target, ask) if ask is not None else ())


CONVOLUTION: dict[str, Rule] = {"convolution.default": _convolution, "convolution_backward.default": _convolution}
