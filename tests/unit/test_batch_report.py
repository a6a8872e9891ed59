"""The answer of ``fxmem batch``: order of the devices, its mapping, and its rows."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from reports import batch_report
from tapes import mlp

import fxmem
from fxmem.allocator_config import AllocatorConfig
from fxmem.batch import Limits, largest
from fxmem.batch_report import DeviceBatch, report_batches
from fxmem.device import find_device
from fxmem.errors import UsageError
from fxmem.estimate import Question
from fxmem.kernels import Target
from fxmem.law import fit
from fxmem.program import Tapes
from fxmem.report import FORMATS, render_batch
from fxmem.report.batch import answer_rows, sections
from fxmem.workload import Mode, Workload


def wide(batch):
    return mlp(batch, width=65536)


def report(*names, batch=1, **said):
    law = fit([wide(2), wide(3), wide(4)])
    tapes = Tapes(law, 3, Target(sm=90, sm_count=132))
    found = []
    for name in names:
        device = find_device(name)
        limits = Limits(capacity_bytes=device.capacity_bytes, context_bytes=device.context_bytes)
        found.append(
            DeviceBatch(
                device=device, answer=largest(tapes, AllocatorConfig(), limits), tape=replace(wide(2), **said), law=law
            )
        )
    question = Question(target="m.py", workload=Workload(mode=Mode.TRAINING, batch=batch), device=found[0].device)
    return report_batches(question, found, 1.5)


def test_the_least_memory_that_holds_it_comes_first():
    names = ("h200", "t4", "a100-40gb")
    assert [entry.device.name for entry in report(*names).devices] == ["t4", "a100-40gb", "h200"]
    middle = report(*names, batch=report("t4").batch + 1)
    assert [entry.device.name for entry in middle.devices] == ["a100-40gb", "h200", "t4"]
    assert middle.fits
    none = report("t4", batch=10**9)
    assert not none.fits


def test_the_mapping_is_json():
    mapping = report("t4", "1GiB").to_dict()
    assert json.loads(json.dumps(mapping)) == mapping
    first = mapping["devices"][0]
    assert mapping["batch"] == first["batch"] > 0
    assert first["margin_bytes"] == first["allocator_bytes"] - first["reserved_bytes"]
    assert first["next"]["batch"] == first["batch"] + 1
    assert first["next"]["at"]["tensors"]
    assert set(mapping["scaling"]["pieces"][0]) == {"from_batch", "to_batch", "fixed_bytes", "per_sample_bytes"}
    assert mapping["coverage"]["unmodelled"][0].startswith("CUDA context")


def test_what_the_tape_says_is_in_every_report():
    found = report("t4", notes=("a workspace is assumed",), unmodelled=("nonzero() is taken as nothing",)).to_dict()
    assert found["coverage"]["lower_bound"]
    assert not report("t4").to_dict()["coverage"]["lower_bound"]
    for name in FORMATS:
        text = render_batch(found, name)
        assert "a workspace is assumed" in text
        assert "nonzero() is taken as nothing" in text


def test_a_real_answer_renders():
    for name in FORMATS:
        assert str(report("t4").batch) in render_batch(report("t4").to_dict(), name)


@pytest.mark.parametrize("name", ["table", "markdown"])
@pytest.mark.parametrize("devices", [1, 2])
def test_golden(golden, name, devices):
    golden(f"batch_{devices}.{name}.txt", render_batch(batch_report(devices=devices), name) + "\n")


def test_table_keeps_the_width():
    text = render_batch(batch_report(processes=3, context_bytes=2**29), "table")
    assert max(map(len, text.splitlines())) <= 100


def test_an_answer_without_proof_says_so():
    first, second = batch_report()["devices"]
    assert answer_rows(second)[0] == ("batch", "none", "no batch is known to fit")
    assert answer_rows({**second, "proved": True})[0][2] == "not even the smallest batch fits"
    assert "batch 97 does not; what lies between was not traced" in answer_rows({**first, "proved": False})[0][2]
    assert "not known not to" in answer_rows({**first, "proved": False, "next": None})[0][2]
    assert len(sections(batch_report(devices=1, next=None))) == 3


@pytest.mark.parametrize(
    ("axis", "bound", "words"),
    [
        ("batch", "memory", "it fits, the next one does not"),
        ("image", "range", "it fits; the end of the range: widen it"),
        ("batch", "range", "it fits; the search ends here"),
        ("seq", "program", "it fits, the next one does not run"),
    ],
)
def test_what_ends_the_search_is_said(axis, bound, words):
    first, _ = batch_report(axis=axis, bound=bound, context_bytes=0)["devices"]
    assert answer_rows(first)[0][2] == f"replayed: {words}"


def test_an_unknown_context_is_said_wherever_a_batch_is():
    first = batch_report()["devices"][0]
    assert answer_rows(first)[0][2] == "replayed: it fits without the context (unknown), the next one does not"
    assert answer_rows(first)[1][2].endswith("x 0.9, without the context (unknown)")
    table = sections(batch_report())[0]
    assert table.rows[0][3] == "yes, if"
    assert table.lines == ("if: there is room too for what is not modelled (see below)",)
    known = sections(batch_report(context_bytes=2**29))[0]
    assert (known.rows[0][3], known.lines) == ("yes", ())


@pytest.mark.parametrize("name", ["table", "markdown"])
def test_a_lower_bound_is_an_upper_bound_of_the_batch(name):
    report = batch_report(context_bytes=2**29)
    report["coverage"] |= {"unmodelled": ["nonzero()"], "lower_bound": True}
    text = " ".join(render_batch(report, name).split())
    assert text.count("at most 96") == 2
    assert "replayed: what is modelled fits, the next one does not" in text
    assert "yes, if" in text


def test_what_the_next_batch_lacks_adds_up():
    first = batch_report()["devices"][0]
    words = (
        "for a request of 935.0 MiB (a segment of 936.0 MiB) beside 9.01 GiB reserved: 9.00 GiB allocated, 8.0 MiB in"
    )
    assert answer_rows(first)[-1][2] == f"{words} free blocks too small"
    tight = {**first["next"], "segment_bytes": 935 * 2**20, "reserved_bytes": 9 * 2**30}
    words = "for a request of 935.0 MiB beside 9.00 GiB allocated"
    assert answer_rows({**first, "next": tight})[-1][2] == words
    found = report("t4").best.answer
    needed = found.next.reserved_bytes + found.next.segment_bytes
    assert needed == found.allocator_bytes + found.next.missing_bytes


def test_many_devices_keep_the_width():
    report = batch_report()
    report["devices"] *= 3
    head = render_batch(report, "table").split("\n\n")[0].splitlines()
    assert len(head) == 3
    assert max(map(len, head)) <= 100
    assert head[2].startswith("  ")


def test_the_next_batch_lacks_memory():
    assert answer_rows(batch_report()["devices"][0])[-1][:2] == ("batch 97", "lacks 44.0 MiB")


def test_it_prints_as_a_sentence():
    found = report("t4", "1GiB")
    small, large = (entry.answer.batch for entry in found.devices)
    words = f"m.py, training: largest batch {small} on 1GiB, {large} on t4"
    assert str(found) == f"{words} (without the CUDA context, which is unknown)"
    least = replace(found, coverage=replace(found.coverage, lower_bound=True))
    assert f"largest batch at most {small} on 1GiB, at most {large} on t4 (" in str(least)


def test_python_renders_what_the_command_line_prints():
    found = report("t4")
    assert fxmem.render(found, "markdown") == render_batch(found.to_dict(), "markdown")
    with pytest.raises(UsageError, match="no format 'html'\n  next: use table, json, markdown"):
        fxmem.render(found, "html")
