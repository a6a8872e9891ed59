"""Budgets of a hand-made model whose memory grows with the square of the sequence length."""

from __future__ import annotations

import functools

from tapes import TapeBuilder

from fxmem.allocator import AllocatorConfig, replay
from fxmem.batch import Limits, largest, with_max_batch
from fxmem.batching import MemoryBudget
from fxmem.device import Device, find_device
from fxmem.estimate import Estimate, Question, assemble
from fxmem.kernels import Target, expand
from fxmem.law import fit, with_kernels
from fxmem.program import Tapes
from fxmem.steady import extend
from fxmem.tape import Role, Tape
from fxmem.workload import Workload

TARGET = Target(sm=90, sm_count=132)
DEVICE = find_device("1GiB", context=0)
SEQS = (16, 64, 128, 256)


def attention(batch: int, seq: int, steps: int = 2) -> Tape:
    """Run two layers of 4 heads on 1024 features: scores of seq x seq beside the hidden states."""
    b = TapeBuilder(batch).keep("w", (1 << 20,)).keep("x", (batch, seq, 1024), Role.INPUT)
    for step in range(1, steps + 1):
        b.step()
        b.op("mm.default", reads=["x", "w"], makes={"h": (batch, seq, 1024)})
        for layer in range(2):
            b.op("bmm.default", reads=["h"], makes={"s": (batch, 4, seq, seq)}, module=f"layer{layer}")
            b.op("_softmax.default", reads=["s"], makes={"p": (batch, 4, seq, seq)}, module=f"layer{layer}")
            b.free("s").op("bmm.default", reads=["p", "h"], makes={"n": (batch, seq, 1024)}, module=f"layer{layer}")
            b.free("p", "h").op("clone.default", reads=["n"], makes={"h": (batch, seq, 1024)}).free("n")
        b.op("mm.default", reads=["h"], makes={f"y{step}": (batch, seq, 256)}, role=Role.OUTPUT).free("h")
        if step > 1:
            b.free(f"y{step - 1}")
    return b.build()


@functools.cache
def estimate(seq: int, safety: float = 0.9, device: Device = DEVICE) -> Estimate:
    traced = [attention(batch, seq) for batch in (1, 2, 3)]
    law = with_kernels(fit(traced), [expand(tape, TARGET) for tape in traced])
    longer = extend(traced[0], 2)
    assert longer is not None
    tape = expand(longer, TARGET)
    question = Question(target="m.py", workload=Workload(seq=seq), device=device)
    found = assemble(question, tape, replay(tape, AllocatorConfig()), law)
    limits = Limits(capacity_bytes=device.capacity_bytes or 0, context_bytes=0, safety=safety)
    return with_max_batch(found, largest(Tapes(law, 2, TARGET), AllocatorConfig(), limits))


@functools.cache
def budget(safety: float = 0.9) -> MemoryBudget:
    return MemoryBudget({seq: estimate(seq, safety) for seq in SEQS}, DEVICE, safety)


def fits(batch: int, seq: int, room: int) -> bool:
    """Ask the replay itself."""
    return replay(expand(attention(batch, seq), TARGET), AllocatorConfig(), room).oom is None
