"""The command line: parse, call the library, write what it returns.

This is the only place that writes, reads the environment, and turns errors into a message
and an exit status: 0 fine, 1 an error that the user can mend, 2 usage, 3 it does not fit.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from fxmem import __version__
from fxmem.allocator_config import AllocatorConfig
from fxmem.calibration import read_calibration, shipped_for
from fxmem.compare import compare
from fxmem.device import Device, all_devices
from fxmem.errors import DoesNotFitError, FxmemError, UsageError
from fxmem.options import (
    calibration_options,
    device_from,
    devices_from,
    parse_vary,
    shared_options,
    verify_options,
    workload_from,
)
from fxmem.report import render_batch, render_calibration, render_diff, render_verification, reporter
from fxmem.report.plot import draw, drawable
from fxmem.report.sections import fits
from fxmem.snapshot import read_snapshot
from fxmem.units import format_size
from fxmem.workload import Workload


class Exit(IntEnum):
    """Exit statuses."""

    FINE = 0
    ERROR = 1
    USAGE = 2
    DOES_NOT_FIT = 3


class _Commands(click.Group):
    """The one place where errors become a message and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; leave with its exit status."""
        try:
            return super().invoke(ctx)
        except FxmemError as error:
            _explain(str(error))
            ctx.exit(_status(error))
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise
            if isinstance(error, RecursionError):
                hint = "nest the modules less deeply, or call sys.setrecursionlimit in the model's file"
                _explain(f"the model is nested deeper than Python's recursion limit\n  next: {hint}")
                ctx.exit(Exit.ERROR)
            name = type(error).__name__
            hint = "please report this with the command; --debug shows the traceback"
            _explain(f"internal error: {name}: {error}\n  next: {hint}")
            ctx.exit(Exit.ERROR)


def _explain(message: str) -> None:
    if _debugging():
        click.echo(traceback.format_exc(), err=True, nl=False)
    click.echo(f"Error: {message}", err=True)


def _debugging() -> bool:
    return bool(click.get_current_context().find_root().meta.get("debug"))


def _status(error: FxmemError) -> Exit:
    match error:
        case UsageError():
            return Exit.USAGE
        case DoesNotFitError():
            return Exit.DOES_NOT_FIT
        case _:
            return Exit.ERROR


def run() -> None:
    """Entry of the process ``fxmem``.

    The process is short and makes millions of objects that live to its end: looking for cycles among
    them, at imports and when the interpreter goes down, takes a third of the time (benchmarks/process_ratio.py).
    """
    gc.disable()
    try:
        main(prog_name="fxmem")
    finally:
        gc.freeze()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="fxmem", message="%(prog)s %(version)s")
def main() -> None:
    """Peak GPU memory of a PyTorch model, before it runs, without a GPU."""


@main.command()
@click.argument("target")
@shared_options
@click.option("--depth", type=click.IntRange(min=0), metavar="N", help="Add a table of the modules to this depth.")
@click.option("--check", is_flag=True, help="Exit with status 3 if it does not fit --device.")
@click.option("--calibration", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Give an interval too, from a receipt of `fxmem calibrate` or from profiles.")  # fmt: skip
@click.pass_context
def estimate(ctx: click.Context, /, target: str, depth: int | None, check: bool, **options: Any) -> None:
    """Estimate the peak memory of TARGET, its parts, its place and the largest batch.

    TARGET is model.py or model.py:factory, package.module:factory, torchvision:NAME,
    timm:NAME, hf:TYPE or hf:PATH/config.json. No weights are loaded.
    """
    ctx.find_root().meta["debug"] = options["debug"]
    workload, device = workload_from(options), device_from(options)
    if check and device.capacity_bytes is None:
        raise UsageError("--check needs a limit", hint="name a GPU or a size with --device")
    _writable(options["output"])
    given = options["calibration"]
    profile = shipped_for(device) if given is None else read_calibration(given, device)
    device = device if profile is None else profile.on(device)
    asked = _library_options(options)
    with _quiet(debug=options["debug"]):
        from fxmem import api

        result = api.estimate(target, workload=workload, device=device, **asked)
    report = result.to_dict()
    if profile is not None:
        report["interval"] = profile.interval(report["peak"]["reserved_bytes"])  # type: ignore[index]
    _write(reporter(options["format_name"], depth=depth).render(report), options["output"])
    if check and not fits(report):
        ctx.exit(Exit.DOES_NOT_FIT)


@main.command()
@click.argument("target")
@shared_options
@click.option("--processes", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
              help="Replicas on one device, each with its own context.")  # fmt: skip
@click.option("--multiple-of", type=click.IntRange(min=1), metavar="N",
              help="Look at multiples of this only.  [default: 32 for images, else 1]")  # fmt: skip
@click.option("--vary", type=parse_vary, metavar="AXIS=A..B",
              help="Find the longest sequence or largest image instead: seq=128..32768, image=64..4096.")  # fmt: skip
@click.option("--curve", is_flag=True, help="Show memory against batch, in parts.")
@click.option("--plot", type=click.Path(dir_okay=False, writable=True, path_type=Path), metavar="FILE.svg|png",
              help="Draw that into a file (needs fxmem[plot]).")  # fmt: skip
@click.option("--check", is_flag=True, help="Exit with status 3 if no device holds --batch.")
@click.pass_context
def batch(ctx: click.Context, /, target: str, *, plot: Path | None, check: bool, **options: Any) -> None:
    """Find the largest batch of TARGET that fits --device, and what binds it.

    The answer's whole run and that of the next batch are replayed, nothing is interpolated.
    --device takes several names with commas between them: the devices that hold --batch come
    first, and of those the one with the least memory, which stands for the cheapest.
    """
    ctx.find_root().meta["debug"] = options["debug"]
    workload, gpus = workload_from(options), devices_from(options)
    _writable(options["output"])
    _writable(plot, "--plot")
    if plot is not None:
        drawable(plot)
    given = {name: options[name] for name in ("processes", "multiple_of", "vary")} | _library_options(options)
    curve = options["curve"] or plot is not None
    with _quiet(debug=options["debug"]):
        from fxmem import api

        result = api.max_batch(target, workload=workload, device=gpus, curve=curve, **given)
    report = result.to_dict()
    _write(render_batch(report, options["format_name"]), options["output"])
    if plot is not None:
        draw(report, plot)
    if check and not result.fits:
        ctx.exit(Exit.DOES_NOT_FIT)


@main.command()
@click.argument("target")
@click.argument("snapshot", type=click.Path(dir_okay=False, path_type=Path))
@shared_options
@click.pass_context
def diff(ctx: click.Context, /, target: str, snapshot: Path, **options: Any) -> None:
    """Compare a recording of a real run of TARGET with what fxmem says.

    SNAPSHOT is what torch.cuda.memory._dump_snapshot(SNAPSHOT) wrote, after
    torch.cuda.memory._record_memory_history() before the model's move to the GPU or before a step.
    Reading it runs no code. Give the options of the real run: --mode, --batch, --optimizer, ...
    """
    ctx.find_root().meta["debug"] = options["debug"]
    workload, device = workload_from(options), device_from(options)
    _writable(options["output"])
    recording = read_snapshot(snapshot)
    with _quiet(debug=options["debug"]):
        from fxmem import api

        tape = api.trace(target, workload=workload, device=device).tape
    report = compare(tape, recording).to_dict(target, str(snapshot))
    _write(render_diff(report, options["format_name"]), options["output"])


@main.command()
@click.argument("target")
@calibration_options
@click.pass_context
def calibrate(ctx: click.Context, /, target: str, **options: Any) -> None:
    """Run TARGET for some seconds on the GPU of this machine, and compare it with the estimate.

    Each batch size runs in a process of its own, the smallest first; a batch that would not fit is
    left out. The figures are stored as a receipt. An interrupted run goes on where it was.
    """
    ctx.find_root().meta["debug"] = options["debug"]
    workload, batches = workload_from({**options, "batch": 1}), options["batches"]
    path = options["output"] or Path("calibration", "receipts", _receipt_name(target, workload))
    conf = _environment_conf() or ""
    with _quiet(debug=options["debug"]), click.progressbar(length=len(set(batches)), file=sys.stderr) as bar:
        from fxmem.calibrate import Series
        from fxmem.calibrate import calibrate as measured

        series = Series(
            target=target, workload=workload, batches=batches, repeats=options["repeats"], device=options["device"],
            limit_seconds=options["limit"], alloc_conf=conf,
        )  # fmt: skip
        receipt = measured(series, path, lambda: bar.update(1))
    click.echo(render_calibration(receipt, options["format_name"]))
    click.echo(f"the receipt is {path}", err=True)


def _receipt_name(target: str, workload: Workload) -> str:
    words = [target, workload.mode.value, workload.dtype, *([f"amp-{workload.amp}"] if workload.amp else [])]
    return re.sub(r"[^A-Za-z0-9_.]+", "-", "-".join(words)).strip("-.") + ".json"


@main.command()
@click.argument("target")
@verify_options
@click.pass_context
def verify(ctx: click.Context, /, target: str, **options: Any) -> None:
    """Run TARGET for real on the CPU, and check that the tracer says the same, event by event.

    A self-check that any laptop can run. Choose a size that the CPU manages: --batch, --image, --seq,
    --model-arg. Exits with status 1 if they differ.
    """
    ctx.find_root().meta["debug"] = options["debug"]
    workload = workload_from(options)
    _writable(options["output"])
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler writes to stderr
    with _quiet(debug=options["debug"]):
        from fxmem.verify import verify as verified

        report = verified(target, workload).to_dict()
    _write(render_verification(report, options["format_name"]), options["output"])
    if not report["same"]:
        ctx.exit(Exit.ERROR)


@main.command()
def devices() -> None:
    """List the GPUs that --device knows."""
    rows = [_device_row(device) for device in all_devices()]
    header = ("name", "GPU", "arch", "SMs", "memory", "context", "source of the memory's size")
    click.echo(tabulate(rows, headers=header, tablefmt="plain", disable_numparse=True, colalign=_DEVICE_ALIGN))


_DEVICE_ALIGN = ("left", "left", "left", "right", "right", "right", "left")


def _device_row(device: Device) -> tuple[str, ...]:
    capacity = "unknown" if device.capacity_bytes is None else format_size(device.capacity_bytes)
    context = "unknown" if device.context_bytes is None else format_size(device.context_bytes)
    shared = ", shared with the host" if device.shared_memory else ""
    kind = device.source.partition(":")[0] + shared
    return (device.name, device.title, device.arch, str(device.sm_count), capacity, context, kind)


def _library_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the library takes beside workload and device; it reads no environment itself."""
    environment = _environment_conf()
    given = {"safety": options["safety"], "reserve_bytes": options["reserve"]}
    return {"alloc_conf": environment, **{name: value for name, value in given.items() if value is not None}}


def _environment_conf() -> str | None:
    """Read before torch is imported, which aborts the process where it cannot read this."""
    conf = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    AllocatorConfig.parse(conf or "")
    return conf


def _writable(output: Path | None, option: str = "--output") -> None:
    """Say so before the run, not after it."""
    if output is not None and not output.absolute().parent.is_dir():
        raise UsageError(f"{output.parent} is not a folder", where=option, hint="make it first")


def _write(text: str, output: Path | None) -> None:
    try:
        if output is None:
            click.echo(text)
        else:
            output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise
        raise FxmemError(
            f"cannot write the report: {error.strerror}",
            where="stdout" if output is None else str(output),
            hint="name another file with --output",
        ) from error


@contextlib.contextmanager
def _stdout_kept() -> Iterator[None]:
    """Send to stderr what subprocesses and C code write to stdout, past ``sys.stdout``."""
    try:
        kept = os.dup(1)
    except OSError:  # there is none
        yield
        return
    try:
        sys.stdout.flush()
        with contextlib.suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _quiet(*, debug: bool) -> Iterator[None]:
    """Keep stdout for the report, and the libraries' warnings and logs to themselves.

    The model's own code may print: that goes to stderr.
    """
    with _stdout_kept(), contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        if debug:
            yield
            return
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)
