"""All rules by operator name. A family of operators has a file of its own."""

from __future__ import annotations

from fxmem.kernels.attention import ATTENTION
from fxmem.kernels.batch_norm import BATCH_NORM
from fxmem.kernels.convolution import CONVOLUTION
from fxmem.kernels.embedding import EMBEDDING
from fxmem.kernels.fft import FFT
from fxmem.kernels.foreach import FOREACH
from fxmem.kernels.gemm import GEMM
from fxmem.kernels.index import INDEX
from fxmem.kernels.losses import LOSSES
from fxmem.kernels.norm import NORM
from fxmem.kernels.pointwise import POINTWISE
from fxmem.kernels.reductions import REDUCTIONS
from fxmem.kernels.resample import RESAMPLE
from fxmem.kernels.rnn import RNN
from fxmem.kernels.sorting import SORTING
from fxmem.kernels.steps import Rule
from fxmem.kernels.transfer import TRANSFER

RULES: dict[str, Rule] = {
    **GEMM,
    **ATTENTION,
    **CONVOLUTION,
    **FFT,
    **FOREACH,
    **LOSSES,
    **NORM,
    **BATCH_NORM,
    **REDUCTIONS,
    **RNN,
    **EMBEDDING,
    **INDEX,
    **SORTING,
    **RESAMPLE,
    **POINTWISE,
    **TRANSFER,
}
