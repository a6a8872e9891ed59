"""Reading recordings: what is in them, and that nothing in them runs."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict

import pytest
from click.testing import CliRunner
from recordings import LIBRARY, LINE, NATIVE, event, snapshot

from fxmem import snapshot as module
from fxmem.cli import main
from fxmem.errors import FxmemError
from fxmem.snapshot import load_plain, parse, read_snapshot


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_plain_data_comes_back(protocol):
    data = {"a": [1, -3, 2**70, 2.5, True, None, "é", b"x", (), (1,), (1, 2, 3, 4)], 5: {}}
    assert load_plain(pickle.dumps(data, protocol)) == data


@pytest.mark.parametrize("protocol", range(6))
def test_no_code_runs(tmp_path, protocol):
    with pytest.raises(FxmemError):
        load_plain(pickle.dumps({"segments": [], "device_traces": [[Evil(str(tmp_path / "made"))]]}, protocol))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("thing", [OrderedDict(a=1), {1, 2}, 1j, os.system, Evil, bytearray(3)])
def test_other_types_are_refused(thing):
    with pytest.raises(FxmemError, match="no plain data"):
        load_plain(pickle.dumps(thing))


@pytest.mark.parametrize(
    "data", [b"", b".", b"\x80\x04", b"hello", b"\x80\x04]r\xff\xff\xff\xff.", b"\x8c\xffabc", b"}(]K\x01u.", b"]a."]
)
def test_broken_pickles_are_refused(data):
    if data.startswith(b"\x80\x04]r"):
        assert load_plain(data) == []  # a memo of four thousand million costs nothing here
        return
    with pytest.raises(FxmemError):
        load_plain(data)


def test_events_and_stacks():
    history = [
        event("segment_alloc", 0, 2**21),
        event("alloc", 512, 40, NATIVE, LIBRARY, LINE),
        event("free_requested", 2048, 7),
        event("what_comes_later", 0, 0),
        event("alloc", 1024, 50, {"name": "cublasCreate_v2 getWorkspace", "filename": "x.cpp", "line": 0}),
        event("free_requested", 512, 40),
    ]
    found = parse(snapshot(history, {1024: 50, 4096: 9}))
    assert [a.nbytes for a in found.allocations] == [7, 9, 40, 50]
    assert found.before == 2
    assert found.events == (2, ~0, 3, ~2)
    assert found.allocations[2].line == "/home/me/train.py:12"
    assert [frame.function for frame in found.allocations[2].stack] == ["linear", "step"]
    assert found.allocations[3].library == "cuBLAS workspace"
    assert found.peak_reserved_bytes == 2**21


def test_reserved_counts_what_was_there_before():
    found = parse(snapshot([event("segment_alloc", 0, 100), event("segment_free", 0, 60), event("alloc", 0, 1)]))
    assert found.peak_reserved_bytes == 2**21 - 40 + 100


def test_blocks_without_addresses_lie_in_a_row():
    data = snapshot([event("alloc", 0, 5)])
    data["segments"][0]["blocks"] = [
        {"size": 512, "state": "inactive"}, {"size": 512, "state": "active_allocated"}, {"size": 1, "state": "later"},
    ]  # fmt: skip
    found = parse(data)
    assert (found.before, found.allocations[0].nbytes) == (1, 512)


def test_the_longest_history_is_taken():
    data = snapshot([event("alloc", 0, 1)])
    data["device_traces"] = [[event("alloc", 0, 1)], [event("alloc", 0, 2), event("alloc", 9, 3)]]
    found = parse(data)
    assert (found.device, [a.nbytes for a in found.allocations]) == (1, [2, 3])
    assert "device 1" in found.notes[0]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([], "no memory snapshot"),
        ({"device_traces": 3}, "no memory snapshot"),
        ({"device_traces": []}, "no history"),
        ({"device_traces": [[], 3]}, "no history"),
        ({"device_traces": [[3]]}, "event 0 is no mapping"),
        ({"device_traces": [[{"action": "alloc", "addr": 1}]]}, "event 0 has no usable 'size'"),
        ({"device_traces": [[{"action": "alloc", "addr": 1, "size": -1}]]}, "'size'"),
        ({"device_traces": [[event("alloc", 0, 1)]], "segments": [{"total_size": "x"}]}, "'total_size'"),
    ],
)
def test_foreign_data(data, reason):
    with pytest.raises(FxmemError, match=reason):
        parse(data)


def test_a_file_too_large(tmp_path, monkeypatch):
    path = tmp_path / "large"
    path.write_bytes(b"x" * 11)
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    with pytest.raises(FxmemError, match="is larger"):
        read_snapshot(path)


def test_the_command_explains(tmp_path):
    path = tmp_path / "evil.pickle"
    path.write_bytes(pickle.dumps(Evil(str(tmp_path / "made"))))
    for name in (path, tmp_path / "absent.pickle"):
        result = CliRunner().invoke(main, ["diff", "m:f", str(name)])
        assert result.exit_code == 1
        assert result.stderr.startswith(f"Error: {name}: ")
        assert "next: write it with" in result.stderr
    assert not (tmp_path / "made").exists()
