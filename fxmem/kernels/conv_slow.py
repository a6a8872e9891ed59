"""Convolutions that neither cuDNN nor the depthwise kernels take: im2col and a matrix product."""

from __future__ import annotations

from fxmem.kernels.steps import Out, Step
from fxmem.tape import Op, TensorMeta


def slow_forward(op: Op, x: TensorMeta, weight: TensorMeta) -> list[Step]:
    return [Out(0)]


def slow_backward(op: Op, x: TensorMeta, weight: TensorMeta, grad: TensorMeta, wanted: tuple[bool, bool]) -> list[Step]:
    return [Out(i) for i in range(sum(wanted))]
