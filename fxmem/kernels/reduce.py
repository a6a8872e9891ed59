"""``gpu_reduce_kernel``: the scratch memory of a reduction that several blocks share.

When each output has many inputs and there are few outputs, blocks reduce a part each and meet in
global memory: a buffer of partial results and a semaphore per output tile, both taken from the
caching allocator for the duration of the launch. Whether, and how large, follows from
``setReduceConfig`` in aten/src/ATen/native/cuda/Reduce.cuh (torch 2.14, shipped with the wheel),
which sees the operands as ``TensorIterator`` has reordered and coalesced them
(:mod:`fxmem.kernels.iterator`). No occupancy query is involved, only device properties.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxmem.kernels.iterator import Reduction
from fxmem.kernels.steps import Drop, Step, Take, Target, itemsize, launch_scratch

_WARP = 32
_MAX_THREADS = 512
"""``mnt_wrapper::MAX_NUM_THREADS``; half of it for complex128."""

_MIN_VALUES = 16
_MAX_VALUES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The template arguments of one ``gpu_reduce_kernel`` that its host side depends on."""

    scalar: str
    """``scalar_t``: what the kernel reads."""
    accumulator: int
    """``sizeof(arg_t)``: bytes of one partial result."""
    vector: int = 4
    """``input_vec_size``."""
    in_place: bool = True
    """``can_accumulate_in_output``: matters only where 32-bit indices do not reach."""


def threads_per_sm(sm: int) -> int:
    """``maxThreadsPerMultiProcessor`` (CUDA C programming guide, table "Technical specifications")."""
    if sm == 75:
        return 1024
    return 1536 if sm in (86, 87, 88, 89, 110, 120, 121) else 2048


def scratch(reduction: Reduction, kernel: Kernel, target: Target) -> list[Step]:
    """What ``gpu_reduce_kernel`` (Reduce.cuh) takes, and gives back, while it runs.

    Args:
        reduction: The operands, coalesced.
        kernel: The kernel's template arguments.
        target: The GPU.
    """
    steps: list[Step] = []
    parts = reduction.split_for_32_bits()
    accumulation = 0
    if len(parts) > 1 and not kernel.in_place:
        accumulation = _accumulation_bytes(reduction, kernel)
        steps.append(Take("accumulation", accumulation))
    for part in parts:
        buffer, semaphores = _global_bytes(part, kernel, target)
        if buffer:
            steps += [
                launch_scratch("reduce buffer", buffer), launch_scratch("semaphores", semaphores),
                Drop("semaphores"), Drop("reduce buffer"),
            ]  # fmt: skip
    if accumulation:
        steps.append(Drop("accumulation"))
    return steps


def _accumulation_bytes(reduction: Reduction, kernel: Kernel) -> int:
    """``AccumulationBuffer``: partial sums of the parts, where the output's type is too narrow for them."""
    if reduction.output_itemsize >= kernel.accumulator:
        return 0
    strides = reduction.strides[0]
    extent = max([reduction.output_itemsize, *(n * s for n, s in zip(reduction.shape, strides, strict=True))])
    return extent // reduction.output_itemsize * kernel.accumulator


def _global_bytes(part: Reduction, kernel: Kernel, target: Target) -> tuple[int, int]:
    """``global_memory_size()`` and ``semaphore_size()`` of the configuration; zeros without a global reduce."""
    config = _Config(part, kernel, target)
    if config.ctas_per_output <= 1:
        return 0, 0
    nbytes = kernel.accumulator * config.outputs * config.ctas_per_output
    if not config.along_fastest:
        nbytes *= config.block_width * config.output_vector
    return nbytes, 4 * config.grid()


class _Config:
    """``ReduceConfig`` as ``setReduceConfig`` (Reduce.cuh) fills it; never leaves :func:`_global_bytes`."""

    def __init__(self, part: Reduction, kernel: Kernel, target: Target) -> None:
        self.outputs = part.outputs
        self.inputs = part.numel // part.outputs
        self.output_vector = 1
        self.step_input = self.step_output = 1
        self.ctas_per_output = 1
        self.along_fastest = part.along_fastest
        first, second = (self.inputs, self.outputs) if self.along_fastest else (self.outputs, self.inputs)
        if part.fastest_stride == itemsize(kernel.scalar):
            if not self.along_fastest:
                self.output_vector = part.output_vector(itemsize(kernel.scalar))
                first //= self.output_vector
            elif first >= 128 and part.reduced_dims == 1:
                first //= kernel.vector
        self._set_block(first, second, _MAX_THREADS // (2 if kernel.scalar == "complex128" else 1))
        self._split(target)

    def _set_block(self, first: int, second: int, max_threads: int) -> None:
        """``set_block_dimension``."""
        threads = max_threads // self.output_vector
        width = _power_of_two(first) if first < threads else threads
        height = _power_of_two(second) if second < threads else threads
        self.block_width = min(width, _WARP)
        self.block_height = min(height, threads // self.block_width)
        self.block_width = min(width, threads // self.block_height)

    def _split(self, target: Target) -> None:
        if self.along_fastest:
            self.step_input *= self.block_width
        else:
            self.step_output *= self.block_width
        across_warps = self.values_per_thread() >= min(self.block_height * 16, _MAX_VALUES)
        if across_warps:
            self.step_input *= self.block_height
        else:
            self.step_output *= self.block_height
        blocks_per_sm = threads_per_sm(target.sm) // (self.block_width * self.block_height)
        target_grid = target.sm_count * blocks_per_sm
        if across_warps and self.values_per_thread() >= _MAX_VALUES and self.grid() <= target_grid:
            fill = _div_up(target_grid, self.grid())
            most = _div_up(self.values_per_thread(), _MIN_VALUES)
            least = _div_up(self.values_per_thread(), _MAX_VALUES)
            self.ctas_per_output = max(least, min(fill, most))

    def values_per_thread(self) -> int:
        return _div_up(self.inputs, self.step_input)

    def grid(self) -> int:
        """``grid().x``."""
        return _div_up(self.outputs // self.output_vector, self.step_output)


def _power_of_two(n: int) -> int:
    """``last_pow2``: the largest power of two that is not above ``n``, at least 1."""
    return 1 << (n.bit_length() - 1) if n > 0 else 1


def _div_up(a: int, b: int) -> int:
    return -(-a // b)
