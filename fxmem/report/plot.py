"""Memory against batch, drawn: as letters in the terminal, or into a file by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fxmem.errors import FxmemError, MissingExtraError, UsageError
from fxmem.units import format_size

_WIDTH = 60
_LETTERS = {
    "parameters": "p", "optimizer_state": "s", "gradients": "g", "activations": "a", "other": "o", "workspaces": "w",
    "cached": "c", "context": "x",
}  # fmt: skip
_NAMES = ", ".join(f"{letter} {name.replace('_', ' ')}" for name, letter in _LETTERS.items())
LEGEND = f"{_NAMES}; | what may be used: there the allocator gives cached blocks back, as far as it can"
_COLORS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#ee6677", "#aa3377", "#bbbbbb", "#555555")
SUFFIXES = (".svg", ".png")


def curve_rows(device: Mapping[str, Any]) -> tuple[tuple[str, str, str], ...]:
    """One row a batch: the batch, its bytes, and a bar of letters with the limit in it.

    Args:
        device: An entry of the report's ``devices`` that has a ``curve``.
    """
    limit = _limit(device)
    scale = max([limit, *(_total(point) for point in device["curve"])])
    mark = round(limit / scale * _WIDTH)
    return tuple(
        (str(point["batch"]), format_size(_total(point)), _bar(point["parts"], scale, mark))
        for point in device["curve"]
    )


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw the parts of the memory against the batch, and the limit of each device.

    Args:
        report: The mapping of a ``BatchReport`` that was made with ``curve``.
        path: Where to, ``.svg`` or ``.png``.

    Raises:
        UsageError: Another suffix, or nothing to draw.
        MissingExtraError: matplotlib is not installed.
    """
    figure_class = drawable(path)
    drawn = next((device for device in report["devices"] if device["curve"]), None)
    if drawn is None:
        raise UsageError("no batch was replayed, there is nothing to draw", where="--plot")
    figure = figure_class(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    batches = [point["batch"] for point in drawn["curve"]]
    stacks = [[point["parts"][name] / 2**30 for point in drawn["curve"]] for name in _LETTERS]
    names = [name.replace("_", " ") for name in _LETTERS]
    axes.stackplot(batches, *stacks, labels=names, colors=_COLORS)
    for device in report["devices"]:
        limit = _limit(device) / 2**30
        axes.axhline(limit, color="black", linewidth=1, linestyle="--")
        axes.annotate(f" {device['name']}: {device['batch']}", (batches[0], limit), va="bottom", fontsize="small")
    title = f"{report['target']} on {drawn['name']}"
    axes.set(xlabel=drawn["axis"], ylabel="GiB", title=title, xlim=(batches[0], batches[-1]), ylim=(0, None))
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), reverse=True)
    try:
        figure.savefig(path)
    except OSError as error:
        raise FxmemError(f"cannot write the plot: {error.strerror}", where=str(path)) from error


def drawable(path: Path) -> Any:
    """Make sure that a plot can be drawn into a file, before the work for it begins.

    Args:
        path: Where to.

    Returns:
        matplotlib's class of figures.

    Raises:
        UsageError: The suffix is neither ``.svg`` nor ``.png``.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise UsageError(f"{path.name} is neither .svg nor .png", where="--plot")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        hint = "pip install 'fxmem[plot]', or --curve for the terminal"
        raise MissingExtraError("plots into a file need matplotlib", where="--plot", hint=hint) from None
    return Figure


def _limit(device: Mapping[str, Any]) -> int:
    """What one process may use, with its context."""
    return int(device["allocator_bytes"]) + int(device["context_bytes"] or 0)


def _total(point: Mapping[str, Any]) -> int:
    return sum(point["parts"].values())


def _bar(parts: Mapping[str, int], scale: int, mark: int) -> str:
    letters, nbytes = "", 0
    for name, letter in _LETTERS.items():
        nbytes += parts[name]
        letters += letter * (round(nbytes / scale * _WIDTH) - len(letters))
    return letters[:mark].ljust(mark) + "|" + letters[mark:]
