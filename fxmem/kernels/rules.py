"""All rules by operator name. A family of operators has a file of its own."""

from __future__ import annotations

from fxmem.kernels.attention import ATTENTION
from fxmem.kernels.convolution import CONVOLUTION
from fxmem.kernels.foreach import FOREACH
from fxmem.kernels.gemm import GEMM
from fxmem.kernels.reductions import REDUCTIONS
from fxmem.kernels.steps import Out, Rule, Step, Target
from fxmem.tape import Op


def _native_dropout(op: Op, target: Target) -> list[Step]:
    """``native_dropout_cuda`` in aten/src/ATen/native/cuda/Dropout.cu: the mask comes first."""
    return [Out(1), Out(0)]


RULES: dict[str, Rule] = {
    **GEMM,
    **ATTENTION,
    **CONVOLUTION,
    **FOREACH,
    **REDUCTIONS,
    "native_dropout.default": _native_dropout,
}
