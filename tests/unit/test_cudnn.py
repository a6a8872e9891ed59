"""Questions, cache, process, table, rule and provider, without cuDNN."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fxmem.cudnn import Convolution, Direction, Source, cache, process, provider, target, workspaces
from fxmem.cudnn.driver import shared_library
from fxmem.cudnn.planner import output_shape, strides
from fxmem.cudnn.sizes import Parts, operands, parts, spread
from fxmem.cudnn.table import encode, read, table

CONV = Convolution(x=(8, 64, 56, 56), w=(64, 64, 3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1))


def test_key_is_the_whole_question():
    others = [
        replace(CONV, direction=Direction.DGRAD), replace(CONV, dtype="float16"), replace(CONV, channels_last=True),
        replace(CONV, tf32=False), replace(CONV, x=(9, 64, 56, 56)), replace(CONV, w=(64, 32, 3, 3)),
        replace(CONV, stride=(2, 2)), replace(CONV, padding=(0, 0)), replace(CONV, dilation=(2, 2)),
    ]  # fmt: skip
    assert len({q.key for q in (CONV, *others)}) == 10
    assert replace(CONV, dtype="float16", tf32=False).key == replace(CONV, dtype="float16").key


def test_planner_sees_the_shapes_and_strides_of_aten():
    assert output_shape(CONV.wire) == [8, 64, 56, 56] == list(CONV.y)
    assert strides((8, 64, 56, 28), channels_last=False) == [64 * 56 * 28, 56 * 28, 28, 1]
    assert strides((384, 1, 7, 7), channels_last=True) == [49, 1, 7, 1]


def test_cache_keeps_answers(tmp_path):
    path = tmp_path / "deep" / "file.json"
    assert cache.load(path) == {}
    assert cache.store(path, {"a": 1})
    assert cache.store(path, {"b": 2})
    assert cache.load(path) == {"a": 1, "b": 2}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 2, "answers": {"a": 1}}', '{"schema": 1, "answers": 3}'])
def test_damaged_cache_counts_as_empty(tmp_path, text):
    path = tmp_path / "file.json"
    path.write_text(text)
    assert cache.load(path) == {}
    path.write_text('{"schema": 1, "answers": {"a": -1, "b": true, "c": 7}}')
    assert cache.load(path) == {"c": 7}


def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert not cache.store(tmp_path / "file" / "x.json", {"a": 1})


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="XDG is for the others")
def test_cache_folder():
    assert cache.folder({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/fxmem")
    assert cache.folder({"HOME": "/h"}) == Path("/h/.cache/fxmem")
    assert cache.folder({"FXMEM_CACHE_DIR": "/f", "HOME": "/h"}) == Path("/f")
    assert cache.folder({}) is None


def test_process_that_cannot_answer():
    plans = process.plan("/nowhere/libcudnn.so.9", target.description(90), [CONV])
    assert plans.version is None
    assert plans.workspaces == (None,)
    assert plans.reason


def test_process_that_takes_too_long(monkeypatch):
    monkeypatch.setattr(process, "_START", "import time; print('{\"version\": 92400}\\n5', flush=True); time.sleep(60)")
    plans = process.plan("x", "{}", [CONV, CONV], seconds=1.0)
    assert plans.workspaces == (5, None)
    assert plans.version == 92400
    assert plans.reason.startswith("took more than")


def test_process_that_dies_on_a_question(monkeypatch):
    code = (
        "import os, sys, json; n = len(json.loads(sys.stdin.readline())['questions']); print('{\"version\": 92400}')\n"
    )
    code += "print(1 if n > 2 else '') ; print(2 if n == 1 else '', flush=True); os._exit(9)"
    monkeypatch.setattr(process, "_START", code.replace("print(1 if n > 2 else '') ;", "n > 2 and print(1);"))
    plans = process.plan("x", "{}", [CONV] * 3)
    assert plans.workspaces[0] == 1
    assert plans.reason


@pytest.mark.skipif(
    not hasattr(os, "memfd_create") or platform.machine() not in ("x86_64", "aarch64"), reason="Linux only"
)
def test_stand_in_library_calls_what_its_slots_say():
    image = shared_library(["one", "two"], {"x86_64": 62, "aarch64": 183}[platform.machine()])
    file = os.memfd_create("test")
    os.write(file, image)
    library = ctypes.CDLL(f"/proc/self/fd/{file}")
    os.close(file)
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)
    functions = [kind(lambda n: n + 1), kind(lambda n: n * 2)]
    slots = (ctypes.c_void_p * 2).in_dll(library, "fxmem_slots")
    for i, function in enumerate(functions):
        slots[i] = ctypes.cast(function, ctypes.c_void_p).value
    assert library.one(20) == 21
    assert library.two(20) == 40


def test_description_speaks_of_a_known_chip():
    said = json.loads(target.description(87, sm_count=16, memory=2**33))
    assert (said["deviceVer"], said["multiProcessorCount"], said["totalGlobalMem"]) == (860, 16, 2**33)


def test_parts():
    assert operands(CONV) == (6422528, 147456, 6422528)
    assert parts(6570000, operands(CONV)) in (Parts((0, 1, 1), 16), Parts((1, 1, 0), 16))
    assert parts(0, operands(CONV)) == Parts((0, 0, 0), 0)
    assert Parts((1, 2, 0), 5).nbytes((10, 100, 1000)) == 215


def test_spread():
    pairs = [(100, 100 + i) for i in range(-10, 11)]
    assert spread(pairs, [100] * 21, share=0.5) == (-0.05, 0.05)
    assert spread([], []) == (0.0, 0.0)


def content(rows):
    shapes = [(CONV.x[1:], CONV.w, CONV.stride, CONV.padding, CONV.dilation)]
    own = {"versions": [-0.1, 0.2], "rule": [-0.3, 0.4], "answers": rows}
    return json.loads(
        json.dumps(
            {"schema": 1, "cudnn": 92400, "batches": [1, 8], "convolutions": shapes, "architectures": {"90": own}}
        )
    )


def test_table_finds_what_it_has_and_infers_the_rest():
    row = [Parts((1, 1, 0), 16), Parts((1, 1, 1), 7)]
    made = read(content({"forward float32 nchw": encode(row, None)}), 90)
    x, w, y = operands(CONV)
    assert made.find(CONV) == x + w + y + 7
    assert made.find(replace(CONV, direction=Direction.WGRAD)) is None
    assert made.find(replace(CONV, tf32=False)) is None
    other = replace(CONV, x=(16, 64, 56, 56))
    assert made.find(other) is None
    x, w, y = operands(other)
    assert made.infer(other) == x + w + y + 7
    assert made.infer(replace(CONV, dtype="float16")) == 0


def test_table_rounds_large_rests_to_blocks_and_shares_rows():
    half = [Parts((0, 1, 0), 5000), Parts((0, 0, 0), 147)]
    brain = [None, half[1]]
    rows = {"wgrad float16 nhwc": encode(half, None), "wgrad bfloat16 nhwc": encode(brain, half)}
    made = read(content(rows), 90)
    assert made.answers["wgrad float16 nhwc"] == (Parts((0, 1, 0), 5120), half[1])
    assert made.answers["wgrad bfloat16 nhwc"] == (None, half[1])


@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 100, 120])
def test_shipped_table(sm):
    shipped = table(sm)
    assert shipped is not None
    assert shipped.cudnn >= 92400
    assert shipped.versions[0] <= 0 <= shipped.versions[1]
    entries = len(shipped.convolutions) * len(shipped.batches)
    assert {len(row) for row in shipped.answers.values()} == {entries}


def test_shipped_table_is_small():
    assert sum(path.stat().st_size for path in Path(provider.__file__).parents[1].glob("data/cudnn*")) < 160_000


def test_shipped_answer_of_resnet50():
    ask = workspaces("sm_90", ask=False, keep=False)
    answer = ask(CONV)
    assert answer.source is Source.TABLE
    assert 6570000 <= answer.nbytes < 6570000 + 512  # the phantom device's figure
    assert answer.low <= answer.nbytes <= answer.high
    assert ask(replace(CONV, x=(7, 64, 57, 57))).source is Source.RULE
    assert ask.reason
    assert "1 from the shipped table, 1 by a rule" in ask.note()


def test_unknown_architecture_takes_the_nearest_older_one():
    ask = workspaces("sm_87", ask=False, keep=False)
    assert ask(CONV).nbytes == workspaces("sm_86", ask=False, keep=False)(CONV).nbytes
    assert "sm_86 in place of sm_87" in ask.note()


def test_provider_asks_once_and_remembers(tmp_path, monkeypatch):
    asked = []

    def fake(library, device, questions, seconds=0.0):
        asked.append(len(questions))
        return process.Plans(version=92400, workspaces=tuple(range(100, 100 + len(questions))))

    monkeypatch.setattr(provider, "plan", fake)
    library = process.Library(path="libcudnn.so.9", version=92400)
    questions = [CONV, replace(CONV, dtype="float16"), CONV]
    first = provider.Workspaces(90, 132, None, library, tmp_path)
    first.prepare(questions)
    assert [first(q).nbytes for q in questions] == [100, 101, 100]
    assert asked == [2]
    second = provider.Workspaces(90, 132, None, library, tmp_path)
    assert second(CONV) == replace(first(CONV), source=Source.CACHE)
    assert asked == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["cudnn-92400-sm_90-132.json"]
    unknown = provider.Workspaces(90, 132, None, replace(library, version=None), tmp_path)
    assert unknown(CONV).source is Source.CUDNN


def test_provider_without_answers_falls_back(monkeypatch):
    monkeypatch.setattr(
        provider, "plan", lambda *a, **k: process.Plans(version=None, workspaces=(None,), reason="broken")
    )
    ask = provider.Workspaces(90, 132, None, process.Library(path="x", version=92400), None)
    assert ask(CONV).source is Source.TABLE
    assert ask.reason == "broken"
