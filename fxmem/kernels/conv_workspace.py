"""Convolution calls as questions to cuDNN: whether PyTorch takes cuDNN, which products, what layout.

The choices are those of ``_select_conv_backend``, ``use_cudnn`` and ``use_cudnn_depthwise`` in
aten/src/ATen/native/Convolution.cpp and of aten/src/ATen/native/cudnn/ConvShared.cpp, for a
cuDNN of 9.15 or later and ``torch.backends.cudnn`` as it comes. Held against
``torch._C._select_conv_backend`` of torch 2.14.1 on the phantom device (13,416 depthwise
calls on each of sm_75, 80, 90 and 120, tests/phantom/test_cudnn_workspaces.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fxmem.cudnn import Answer, Convolution, Direction
from fxmem.kernels.steps import Drop, Step, Take, Target, suggests_channels_last, tensor
from fxmem.tape import Op, Role, Tape, TensorMeta

FORWARD = "convolution.default"
BACKWARD = "convolution_backward.default"

_INT_MAX = 2**31 - 1
_DTYPES = ("float32", "float16", "bfloat16", "float64")

Ask = Callable[[Convolution], Answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The arguments that the two operators share, one-dimensional convolutions as ATen's ``view4d`` makes them."""

    input: TensorMeta
    weight: TensorMeta
    result: tuple[int, ...]
    """Shape of the output or of its gradient."""
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def channels_last(self) -> bool:
        """``cudnn_conv_suggest_memory_format`` of aten/src/ATen/native/ConvUtils.h."""
        if self.weight.dtype == "float64":
            return False
        return suggests_channels_last(self.input) or suggests_channels_last(self.weight)

    @property
    def depthwise(self) -> bool:
        """``is_depthwise``."""
        channels = self.input.shape[1]
        return (
            not self.transposed and self.groups > 1 and self.groups == channels and self.weight.shape[0] % channels == 0
        )


def questions(op: Op, target: Target) -> tuple[Convolution, ...]:
    """The products that a convolution call leaves to cuDNN, in the order in which it computes them.

    Empty where PyTorch takes a kernel of its own, and for any other operator.
    """
    if op.name not in (FORWARD, BACKWARD):
        return ()
    call = _call(op)
    if call is None or not uses_cudnn(call, target):
        return ()
    if op.name == FORWARD:
        return (_product(call, Direction.FORWARD),)
    mask = op.args[10]
    assert isinstance(mask, Sequence)
    wanted = (d for d, asked in zip((Direction.DGRAD, Direction.WGRAD), mask, strict=False) if asked)
    return tuple(_product(call, direction) for direction in wanted)


def tape_questions(tapes: Iterable[Tape], target: Target) -> tuple[Convolution, ...]:
    """The distinct questions of tapes in order of first use, to be asked in one go."""
    found = (question for tape in tapes for op in tape.ops for question in questions(op, target))
    return tuple(dict.fromkeys(found))


def workspace_steps(op: Op, target: Target, ask: Ask) -> list[list[Step]]:
    """For each of :func:`questions`' products, in that order: its workspace, taken and given back.

    A product takes it when its result is allocated and its operands are dense, and gives it back before
    anything else happens (``run_conv_plan``); a workspace of 0 bytes is not allocated.
    """
    return [_workspace(question, ask(question)) for question in questions(op, target)]


def _workspace(question: Convolution, answer: Answer) -> list[Step]:
    key = f"cudnn {question.direction}"
    return [Take(key, answer.nbytes, Role.WORKSPACE), Drop(key)] if answer.nbytes else []


def _product(call: _Call, direction: Direction) -> Convolution:
    swapped = {Direction.FORWARD: Direction.DGRAD, Direction.DGRAD: Direction.FORWARD, Direction.WGRAD: Direction.WGRAD}
    return Convolution(
        direction=swapped[direction] if call.transposed else direction,
        x=call.result if call.transposed else call.input.shape,
        w=call.weight.shape, stride=call.stride, padding=call.padding, dilation=call.dilation,
        dtype=call.weight.dtype, channels_last=call.channels_last,
    )  # fmt: skip


def _call(op: Op) -> _Call | None:
    """Read the arguments; ``None`` for a call on host tensors or with sizes that are not numbers."""
    backward = op.name == BACKWARD
    first = 1 if backward else 0
    x, weight = tensor(op, first), tensor(op, first + 1)
    result = tensor(op, 0) if backward else (op.outputs[0] if op.outputs else None)
    if x is None or weight is None or result is None or min(x.storage, weight.storage) < 0:
        return None
    stride, padding, dilation, transposed, output_padding, groups = op.args[first + 3 : first + 9]
    lists = [_ints(values, len(weight.shape) - 2) for values in (stride, padding, dilation, output_padding)]
    shape = result.shape
    if len(weight.shape) == 3:
        x, weight, shape = _view4d(x, dense=True), _view4d(weight), (*shape[:2], 1, *shape[2:])
        lists = [(fill, *values) for fill, values in zip((1, 0, 1, 0), lists, strict=True)]
    assert isinstance(groups, int)
    return _Call(
        input=x, weight=weight, result=shape, stride=lists[0], padding=lists[1], dilation=lists[2],
        transposed=bool(transposed), output_padding=lists[3], groups=groups,
    )  # fmt: skip


def _ints(values: object, count: int) -> tuple[int, ...]:
    """``expand_param_if_needed``: one number stands for all dimensions."""
    assert isinstance(values, Sequence)
    numbers = tuple(int(v) for v in values)
    return numbers * count if len(numbers) == 1 else numbers


def _view4d(meta: TensorMeta, *, dense: bool = False) -> TensorMeta:
    """``unsqueeze(2)``; a one-dimensional input is made dense before (``_convolution``)."""
    n, c, length = meta.shape
    stride = (c * length, length, 1) if dense else meta.stride
    return meta._replace(shape=(n, c, 1, length), stride=(*stride[:2], stride[2] * length, stride[2]))


def uses_cudnn(call: _Call, target: Target) -> bool:
    """Whether ``_select_conv_backend`` takes cuDNN."""
    if 0 in call.input.shape[:2] or 0 in call.result or call.weight.dtype not in _DTYPES:
        return False
    if call.depthwise:
        return _uses_cudnn_depthwise(call, target)
    return _can_use_cudnn(call, target)


def _can_use_cudnn(call: _Call, target: Target) -> bool:
    """``use_cudnn``; bfloat16 needs an Ampere (``supportsBFloat16ConvolutionWithCuDNNv8``)."""
    if call.weight.dtype == "bfloat16" and target.sm < 80:
        return False
    return all(p < s for p, s in zip(call.output_padding, call.stride, strict=True))


def _uses_cudnn_depthwise(call: _Call, target: Target) -> bool:
    """``use_cudnn_depthwise``: channels-last always, else float16 where cuDNN was found to be faster."""
    if max(math.prod(call.input.shape), math.prod(call.weight.shape)) > _INT_MAX or call.channels_last:
        return True
    height, stride = call.input.shape[2], call.stride
    return (
        _can_use_cudnn(call, target)
        and call.weight.dtype == "float16"
        and len(call.input.shape) == 4
        and set(call.dilation) == {1}
        and (stride[0] == stride[1] or height == 1)
        and call.input.shape[1] >= 32
        and _worth_cudnn(call)
    )


def _worth_cudnn(call: _Call) -> bool:
    """``check_cudnn_depthwise_workload_with_filter``."""
    batch, channels, height, width = call.input.shape
    stride, kernel = call.stride[1], call.weight.shape[3]
    if height == 1 and stride == 1:
        return True
    if call.weight.shape[2] != kernel or kernel not in (1, 3, 5) or width < 7 or stride not in (1, 2):
        return False
    if stride == 1:
        return True
    if batch == 1:
        return kernel != 1 or width <= 28
    if kernel == 1:
        return batch <= 16 and channels >= 128 and width <= 7
    return channels >= 512 or (channels >= 256 and width >= 28)
