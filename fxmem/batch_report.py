"""The answer of ``fxmem batch``: the largest batch on each device, and what binds it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxmem.batch import BatchAnswer
from fxmem.coverage import Coverage, cover
from fxmem.curve import Sample
from fxmem.device import Device
from fxmem.estimate import SCHEMA, Question, Scaling, mapping
from fxmem.law import BatchLaw
from fxmem.tape import Tape


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """The largest batch on one device."""

    device: Device
    answer: BatchAnswer
    tape: Tape
    """With what kernels take: what was assumed and left out. Of the answer where that was traced, else of a
    batch of the same law."""
    law: BatchLaw | None
    """``None`` along another axis than the batch."""
    curve: tuple[Sample, ...] = ()
    """Memory against batch, where it was asked for."""

    @property
    def scaling(self) -> Scaling:
        """The peak of the requested bytes as a function of the batch."""
        if self.law is None:
            return Scaling(exact=False, pieces=(), why=f"along {self.answer.axis}")
        return Scaling(exact=self.law.exact, pieces=self.law.pieces(), why=self.law.why)

    def to_dict(self) -> dict[str, object]:
        """Give the entry of the JSON object's ``devices``."""
        device, answer = self.device, self.answer
        limits = answer.limits
        return {
            "name": device.name, "arch": device.arch, "capacity_bytes": device.capacity_bytes,
            "context_bytes": device.context_bytes, "axis": answer.axis, "batch": answer.batch, "proved": answer.proved,
            "bound": str(answer.bound), "safety": limits.safety, "reserved_for_others_bytes": limits.reserve_bytes,
            "processes": limits.processes, "multiple_of": answer.multiple_of,
            "allocator_bytes": answer.allocator_bytes, "reserved_bytes": answer.reserved_bytes,
            "margin_bytes": answer.margin_bytes, "releases": answer.releases, "traces": answer.traces,
            "next": None if answer.next is None else mapping(answer.next),
            "scaling": mapping(self.scaling),
            "curve": [{"batch": sample.batch, "parts": dict(sample.parts)} for sample in self.curve],
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """The whole answer for one target, workload and list of devices."""

    question: Question
    torch: str
    devices: tuple[DeviceBatch, ...]
    """Those that hold the workload's batch come first; among them the one with the least memory, which
    stands for the cheapest: prices change by the day and are not known here."""
    coverage: Coverage
    seconds: float

    def __str__(self) -> str:
        bound = "at most " if self.coverage.lower_bound else ""
        answers = (
            f"{bound}{entry.answer.batch} on {entry.device.name}"
            if entry.answer.batch
            else f"none on {entry.device.name}"
            for entry in self.devices
        )
        what = f"{self.question.target}, {self.question.workload.mode}"
        unknown = any(entry.device.context_bytes is None for entry in self.devices)
        context = " (without the CUDA context, which is unknown)" if unknown else ""
        return f"{what}: largest {self.best.answer.axis} {', '.join(answers)}{context}"

    @property
    def best(self) -> DeviceBatch:
        """The first device."""
        return self.devices[0]

    @property
    def batch(self) -> int:
        """The largest batch on the first device."""
        return self.best.answer.batch

    @property
    def fits(self) -> bool:
        """Whether some device holds the workload's batch."""
        return self.batch >= self.wanted

    @property
    def wanted(self) -> int:
        """The batch that a device must hold; along another axis any value will do."""
        return _wanted(self.question, self.best)

    def to_dict(self) -> dict[str, object]:
        """Give the JSON object of ``fxmem batch --format json``."""
        workload = self.question.workload
        return {
            "schema": SCHEMA,
            "target": self.question.target,
            "mode": workload.mode.value,
            "dtype": workload.dtype,
            "amp": workload.amp,
            "optimizer": workload.optimizer if workload.training else None,
            "torch": self.torch,
            "axis": self.best.answer.axis,
            "at_batch": None if self.best.law is not None else workload.batch,
            "wanted_batch": self.wanted,
            "batch": self.batch,
            "fits": self.fits,
            "devices": [entry.to_dict() for entry in self.devices],
            "scaling": mapping(self.best.scaling),
            "coverage": mapping(self.coverage),
            "seconds": self.seconds,
        }


def report_batches(question: Question, found: Sequence[DeviceBatch], seconds: float) -> BatchReport:
    """Order the devices and gather what must be said.

    Args:
        question: Target and workload; its device is not looked at.
        found: At least one device's answer.
        seconds: Time that it took.
    """
    wanted = _wanted(question, found[0])
    ordered = sorted(found, key=lambda entry: (entry.answer.batch < wanted, entry.device.capacity_bytes or 0))
    notes = list[str]()
    for entry in ordered:
        notes += entry.tape.notes
        label = f"{entry.device.name}: " if len(ordered) > 1 else ""
        notes += [label + note for note in (*entry.answer.notes, *_slow(entry.answer))]
    missing = [text for entry in ordered for text in entry.tape.unmodelled]
    return BatchReport(
        question=question,
        torch=ordered[0].tape.torch_version,
        devices=tuple(ordered),
        coverage=cover([entry.device for entry in ordered], missing, notes),
        seconds=seconds,
    )


def _wanted(question: Question, entry: DeviceBatch) -> int:
    return question.workload.batch if entry.law is not None else 1


def _slow(answer: BatchAnswer) -> list[str]:
    if not answer.releases:
        return []
    times = "once" if answer.releases == 1 else f"{answer.releases} times"
    why = f"the allocator gives its cached blocks back {times}"
    return [f"{answer.axis} {answer.batch} fits because {why}: those steps are slower"]
