"""Mutated recordings: no code runs, nothing but an explained error comes out."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import events_of, snapshot
from tapes import mlp

from fxmem.cli import main
from fxmem.errors import FxmemError
from fxmem.snapshot import Recording, read_snapshot

FOLDER = Path(tempfile.mkdtemp(prefix="fxmem-snapshot-"))
MADE = FOLDER / "made"
GOOD = [pickle.dumps(snapshot(events_of(mlp(2))), protocol) for protocol in (2, 4, 5)]
CALLS = (
    f"cos\nmkdir\n(V{MADE}\ntR".encode(),
    b"\x8c\x02os\x8c\x05mkdir\x93(X" + len(str(MADE)).to_bytes(4, "little") + str(MADE).encode() + b"tR",
    f"(ios\nmkdir\nV{MADE}\n".encode(),
    f"(cos\nmkdir\nV{MADE}\no".encode(),
    b"Pname\n", b"\x82\x01", b"Q", b"b", b"\x81", b"r\xff\xff\xff\xff", b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x96\xff\xff\xff\xff\xff\xff\xff\x00", b"I9\n", b"\x8b\xff\xff\xff\x7f", b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
)  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    data = bytearray(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("flip", "cut", "insert", "repeat", "code"))):
            case "flip":
                data[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "cut":
                del data[at : at + draw(st.integers(1, 400))]
            case "insert":
                data[at:at] = draw(st.binary(max_size=12))
            case "repeat":
                data[at:at] = data[: draw(st.integers(0, 200))]
            case _:
                data[at:at] = draw(st.sampled_from(CALLS))
    return bytes(data)


@settings(max_examples=200, deadline=None)
@given(mutated())
def test_mutated(data):
    path = FOLDER / "run.pickle"
    path.write_bytes(data)
    try:
        assert isinstance(read_snapshot(path), Recording)
    except FxmemError:
        result = CliRunner().invoke(main, ["diff", "m:f", str(path)])
        assert result.exit_code == 1
        assert result.stderr.startswith(f"Error: {path}: ")
        assert "Traceback" not in result.stderr
    assert not MADE.exists()


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_each_call_alone(call):
    (FOLDER / "run.pickle").write_bytes(b"\x80\x04" + call + b".")
    with pytest.raises(FxmemError):
        read_snapshot(FOLDER / "run.pickle")
    assert not MADE.exists()
    assert [path.name for path in FOLDER.iterdir()] == ["run.pickle"]
