from __future__ import annotations

import pytest

from fxmem.errors import UsageError
from fxmem.units import format_count, format_size, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * 2**30),
        ("24 gib", 24 * 2**30),
        (" 512MiB ", 512 * 2**20),
        ("16GB", 16 * 10**9),
        ("1e9", 10**9),
        ("1.5k", 1500),
        ("79.25GiB", 79 * 2**30 + 2**28),
        ("0", 0),
        ("1B", 1),
        ("9007199254740993", 9007199254740993),  # does not fit a float
    ],
)
def test_parse_size(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "24 GiBs", "-1", "1e", "1,5GiB", "nan", "inf"])
def test_no_size(text):
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (2**20, "1.0 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (-(2**20), "-1.0 MiB"),
    ],
)
def test_format_size(nbytes, text):
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (1500, "1.50 k"), (7 * 10**9, "7.00 G"), (10**15, "1.00 P")]
)
def test_format_count(number, text):
    assert format_count(number) == text
