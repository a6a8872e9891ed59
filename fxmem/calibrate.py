"""A short run on a GPU, batch by batch, held beside the estimate: what ``fxmem calibrate`` does.

Each batch size is measured in a process of its own (:mod:`fxmem.measure`), the smallest first. A batch that
the estimate says will not fit is not tried; one that runs out of memory all the same ends the series. What
has been measured is kept from batch to batch, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import fxmem
from fxmem import receipt
from fxmem.allocator import replay
from fxmem.allocator_config import AllocatorConfig
from fxmem.api import trace
from fxmem.device import Device
from fxmem.errors import FxmemError, UsageError
from fxmem.measure import request_text
from fxmem.workload import Workload

__all__ = ["Series", "calibrate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What to measure."""

    target: str
    workload: Workload
    batches: tuple[int, ...] = (1, 2, 4, 8)
    repeats: int = 3
    device: str = "cuda:0"
    limit_seconds: float = 120.0
    alloc_conf: str = ""

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1 or self.repeats < 1:
            raise UsageError("batches and repeats must be at least 1", where="--batches")


def calibrate(series: Series, path: Path, done: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """Measure, compare, and write the receipt.

    Args:
        series: What to measure.
        path: Where the receipt goes; beside it lies what is kept of an interrupted run.
        done: Called after each batch.

    Returns:
        The receipt.

    Raises:
        FxmemError: There is no GPU, the target cannot be built, or the receipt cannot be written.
    """
    return _Calibration(series, path).run(done)


class _Calibration:
    """One series; never leaves :func:`calibrate`."""

    def __init__(self, series: Series, path: Path) -> None:
        self.series, self.path = series, path
        self.kept = path.with_name(path.name + ".partial")
        self.ends = time.monotonic() + series.limit_seconds
        self.environment: dict[str, Any] = {}
        self.free_bytes = 0
        self.entries: list[dict[str, Any]] = []

    def run(self, done: Callable[[], object]) -> dict[str, Any]:
        known = self._known()
        stop = ""
        for batch in sorted(set(self.series.batches)):
            if batch in known:
                self.entries.append(known[batch])
            else:
                self.entries.append(self._at(batch, stop))
                receipt.write(self._receipt(), self.kept)
            status = self.entries[-1]["status"]
            stop = stop or (f"batch {batch} ended with {status}" if status in ("oom", "timeout") else "")
            done()
        final = self._receipt()
        if not any(entry["status"] == "measured" for entry in self.entries):
            self.kept.unlink(missing_ok=True)
            raise FxmemError(
                f"nothing was measured: {self.entries[0].get('reason', 'no batch was run')}",
                where=self.series.target, hint="try smaller batches, or a longer --limit",
            )  # fmt: skip
        receipt.write(final, self.path)
        self.kept.unlink(missing_ok=True)
        return final

    def _at(self, batch: int, stop: str) -> dict[str, Any]:
        """Measure one batch, unless it is known not to fit."""
        if not self.environment:  # the first one also says which GPU there is
            answer = self._ask(batch)
            if "total_bytes" not in answer:
                raise FxmemError(
                    f"no measurement on {self.series.device}: {answer.get('reason', 'the process died')}",
                    where=self.series.target, hint="a machine with a GPU and a CUDA build of torch is needed",
                )  # fmt: skip
            self._adopt(answer)
            return self._entry(batch, answer)
        estimate, tape = self._estimate(batch)
        if not stop and estimate["reserved"] > self.free_bytes:
            stop = "the estimate says that it does not fit"
        answer = {"status": "skipped", "reason": stop} if stop else self._ask(batch)
        return receipt.entry(batch, answer, estimate, tape)

    def _entry(self, batch: int, answer: dict[str, Any]) -> dict[str, Any]:
        estimate, tape = self._estimate(batch)
        return receipt.entry(batch, answer, estimate, tape)

    def _adopt(self, answer: dict[str, Any]) -> None:
        self.environment = {name: answer.get(name) for name in ("gpu", "driver", "cuda", "cudnn", "torch")}
        self.environment["allocator_settings"] = self.series.alloc_conf
        self.environment["total_bytes"], self.free_bytes = answer["total_bytes"], answer["free_bytes"]

    def _estimate(self, batch: int) -> tuple[dict[str, int], str]:
        workload = replace(self.series.workload, batch=batch)
        tape = trace(self.series.target, workload=workload, device=_device(self.environment["gpu"])).tape
        plan = replay(tape, AllocatorConfig.parse(self.series.alloc_conf))
        return receipt.estimated(tape, plan), receipt.tape_hash(tape)

    def _ask(self, batch: int) -> dict[str, Any]:
        """Run the measuring process; whatever becomes of it is the answer."""
        left = self.ends - time.monotonic()
        if left <= 0:
            return {"status": "timeout", "reason": f"the limit of {self.series.limit_seconds:g} s was reached"}
        workload = replace(self.series.workload, batch=batch)
        with tempfile.TemporaryDirectory(prefix="fxmem-") as folder:
            request, result = Path(folder, "request"), Path(folder, "result.json")
            request.write_text(
                request_text(self.series.target, workload, self.series.device, self.series.repeats), encoding="utf-8"
            )
            command = [sys.executable, "-m", "fxmem.measure", str(request), str(result)]
            try:
                ended = subprocess.run(  # noqa: S603 - this Python, this package
                    command, timeout=left, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return {"status": "timeout", "reason": f"the limit of {self.series.limit_seconds:g} s was reached"}
            if not result.exists():
                last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
                return {"status": "failed", "reason": f"the process ended with {ended.returncode}: {last[0][:200]}"}
            answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
            return answer

    # -------------------------------------------------------------- the receipt
    def _receipt(self) -> dict[str, Any]:
        return {
            "kind": "fxmem receipt", "schema": receipt.SCHEMA, "fxmem": fxmem.__version__,
            "target": self.series.target, "options": self._options(), "environment": self.environment,
            "entries": self.entries, "laws": receipt.laws(self.entries), "verdict": receipt.verdict(self.entries),
        }  # fmt: skip

    def _options(self) -> dict[str, Any]:
        """The workload as JSON has it, without the batch."""
        options = {item.name: getattr(self.series.workload, item.name) for item in fields(Workload)}
        del options["batch"]
        options |= {"repeats": self.series.repeats, "device": self.series.device}
        plain: dict[str, Any] = json.loads(json.dumps(options, default=str))
        return plain

    def _known(self) -> dict[int, dict[str, Any]]:
        """What an interrupted run of the same series has measured."""
        try:
            before = receipt.read(self.kept)
        except FxmemError:
            return {}
        same = before["target"] == self.series.target and before["options"] == self._options()
        environment = before["environment"]
        if not same or environment.get("allocator_settings") != self.series.alloc_conf:
            return {}
        if before["fxmem"] != fxmem.__version__ or "total_bytes" not in environment:
            return {}
        self.environment, self.free_bytes = environment, environment["total_bytes"]
        return {entry["batch"]: entry for entry in before["entries"] if entry["status"] == "measured"}


def _device(gpu: dict[str, Any]) -> Device:
    return Device(
        name=gpu["name"], title=gpu["name"], arch=gpu["arch"], capacity_bytes=gpu["capacity_bytes"],
        sm_count=gpu["sm_count"], context_bytes=None, source="the driver",
    )  # fmt: skip
