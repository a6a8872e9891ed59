"""The only place that parses or prints bytes. GiB = 2**30, GB = 10**9."""

from __future__ import annotations

import re

from fxmem.errors import UsageError

_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str) -> int:
    """Read a size.

    Args:
        text: ``24GiB``, ``512MiB``, ``1e9``, ``16 GB``; plain numbers are bytes.

    Returns:
        Bytes.

    Raises:
        UsageError: ``text`` is no size.

    >>> parse_size("24GiB")
    25769803776
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{text!r} is not a size", hint="write it as 24GiB, 512MiB, 16GB or 1e9")
    return round(float(match.group(1)) * factor) if not match.group(1).isdigit() else int(match.group(1)) * factor


def format_size(nbytes: int) -> str:
    """Print bytes for a person, in B, KiB, MiB or GiB.

    >>> format_size(489397248)
    '466.7 MiB'
    """
    if abs(nbytes) >= 2**30:
        return f"{nbytes / 2**30:.2f} GiB"
    if abs(nbytes) >= 2**20:
        return f"{nbytes / 2**20:.1f} MiB"
    if abs(nbytes) >= 2**10:
        return f"{nbytes / 2**10:.1f} KiB"
    return f"{nbytes} B"


def format_count(number: int) -> str:
    """Print a count of parameters or FLOPs with its decimal prefix.

    >>> format_count(25557032)
    '25.56 M'
    """
    for factor, prefix in ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.2f} {prefix}"
    return str(number)
