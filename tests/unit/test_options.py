from __future__ import annotations

import pytest
from click.testing import CliRunner

from fxmem.cli import main
from fxmem.errors import UsageError
from fxmem.options import parse_assignment, parse_input
from fxmem.workload import InputSpec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("3x224x224", InputSpec(None, (3, 224, 224), None)),
        ("input_ids=128:int64", InputSpec("input_ids", (128,), "int64")),
        ("x=128", InputSpec("x", (128,), None)),
        ("5:torch.float16", InputSpec(None, (5,), "float16")),
        ("labels=:int64", InputSpec("labels", (), "int64")),
        (":int64", InputSpec(None, (), "int64")),
    ],
)
def test_inputs(text, spec):
    assert parse_input(text) == spec


@pytest.mark.parametrize("text", ["", "x=", "3xx4", "3x-1", "3.5", "a b=3", "=3", "3:", "x=y=3", "int64"])
def test_no_input(text):
    with pytest.raises(UsageError, match="is not an input"):
        parse_input(text)


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("depth=12", ("depth", 12)),
        ("rate=1e-3", ("rate", 1e-3)),
        ("act=gelu", ("act", "gelu")),
        ("sizes=[1, 2]", ("sizes", [1, 2])),
        ("name='a=b'", ("name", "a=b")),
        ("tie=true", ("tie", True)),
        ("tie=False", ("tie", False)),
        ("rope=null", ("rope", None)),
        ("empty=", ("empty", "")),
    ],
)
def test_assignments(text, pair):
    assert parse_assignment(text) == pair


@pytest.mark.parametrize("text", ["depth", "=3", " =3"])
def test_no_assignment(text):
    with pytest.raises(UsageError, match="is not KEY=VALUE"):
        parse_assignment(text)


@pytest.mark.parametrize("option", ["--context", "--reserve"])
@pytest.mark.parametrize("size", ["450", "2", "1e3", " 0.5e3 "])
def test_a_size_lacks_its_unit(option, size):
    result = CliRunner().invoke(main, ["estimate", "model.py", option, size])
    assert result.exit_code == 2
    assert f"{option}: {size!r} is " in result.output
    assert f"next: write the unit: {size.strip()}MiB or {size.strip()}GiB" in result.output


@pytest.mark.parametrize("size", ["0", "450000000", "1e9", "12KiB", "450MiB", "5B"])
def test_a_size_may_be_bytes(size):
    result = CliRunner().invoke(main, ["estimate", "no such.py", "--context", size, "--reserve", size])
    assert "no such file" in result.output
