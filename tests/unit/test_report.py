"""Rows are computed apart from their rendering; the rendering is held by golden files."""

from __future__ import annotations

import json

import pytest
from reports import GIB, MIB, bare_report, module, tensor, training_report

from fxmem.report import FORMATS, reporter
from fxmem.report.modules import module_rows
from fxmem.report.scaling import law_lines, law_rows
from fxmem.report.sections import breakdown_rows, fits, headline, peak_rows, place_rows, sections, size, tensor_rows


@pytest.mark.parametrize("name", FORMATS)
def test_training_golden(golden, name):
    golden(f"report_training.{name}.txt", reporter(name, depth=1).render(training_report()) + "\n")


@pytest.mark.parametrize("name", ["table", "markdown"])
def test_bare_golden(golden, name):
    golden(f"report_bare.{name}.txt", reporter(name).render(bare_report()) + "\n")


def test_table_is_one_screen():
    report = training_report()
    report["peak_at"]["tensors"] *= 5
    lines = reporter("table").render(report).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100
    assert not any(line != line.rstrip() for line in lines)


def test_long_names_keep_the_width():
    report = training_report(target="a" * 40)
    report["peak_at"]["tensors"] = [tensor(MIB, "temporaries", (1,) * 9, "block." * 30 + "end", "op" * 60)]
    report["coverage"]["unmodelled"] = ["word " * 60]
    lines = reporter("table").render(report).splitlines()
    assert max(map(len, lines)) <= 100
    assert any("block.end" in line for line in lines)


def test_json_is_the_mapping():
    report = training_report()
    assert json.loads(reporter("json").render(report)) == report


def test_unknown_is_never_zero():
    report = bare_report()
    assert size(None) == "unknown"
    assert peak_rows(report)[2] == (
        "device",
        "unknown",
        "no measured CUDA context for h200; give its size with --context",
    )
    assert ("context", "unknown", "", "") in breakdown_rows(report)
    assert law_lines(report) == ("unknown: the sizes were traced at this batch only",)
    assert place_rows(report) == (("unknown", "the trace has no operator at the peak"),)


def test_unmodelled_is_shown_in_every_text():
    for name in ("table", "markdown", "json"):
        text = reporter(name).render(bare_report()).replace("\\", "")
        assert "my_ops.fused_rope: no rule for its workspace" in text


def test_breakdown_shares():
    rows = {row[0]: row for row in breakdown_rows(training_report())}
    assert rows["activations"][1:3] == ("700.0 MiB", "53.8%")
    assert rows["activations"][3] == "#" * 13
    assert rows["optimizer state"][2] == "15.1%"
    assert rows["context"][2:] == ("", "")
    assert "workspaces" not in {row[0] for row in breakdown_rows(bare_report())}


def test_it_fits():
    assert fits(training_report())
    rows = {row[0]: row for row in peak_rows(training_report())}
    assert rows["fits"][1] == "yes"


@pytest.mark.parametrize("known", [True, False])
def test_it_does_not_fit(known):
    report = training_report()
    report["device"]["capacity_bytes"] = GIB
    if not known:
        report["peak"]["device_bytes"] = None
    assert not fits(report)
    row = next(row for row in peak_rows(report) if row[0] == "fits")
    assert row[1] == "no"
    assert row[2].endswith("more than the device's 1.00 GiB, 1.00 GiB of it kept for others")


@pytest.mark.parametrize(
    ("known", "words"),
    [
        (True, "what is not modelled (see below) takes at most the 45.31 GiB left of 48.00 GiB"),
        (False, "the CUDA context (unknown) and what else is not modelled (see below) take at most the 45.73 GiB left"),
    ],
)
def test_a_lower_bound_is_no_yes(known, words):
    report = training_report(coverage={"unmodelled": ["nonzero()"], "lower_bound": True, "notes": []})
    if not known:
        report["peak"]["device_bytes"] = None
    row = next(row for row in peak_rows(report) if row[0] == "fits")
    assert row[1] == "yes, if"
    assert row[2].startswith(words)
    for name in ("table", "markdown"):
        assert "at most 480 (safety 0.05" in reporter(name).render(report)
    report["device"]["capacity_bytes"] = GIB
    assert next(row for row in peak_rows(report) if row[0] == "fits")[2].startswith("at least ")


def test_the_largest_batch_says_that_the_context_is_unknown():
    report = training_report(max_batch={"batch": 52, "safety": 0.9})
    assert law_rows(report)[-1] == ("largest batch", "52 (safety 0.9)")
    report["peak"]["device_bytes"] = None
    assert law_rows(report)[-1] == ("largest batch", "52 (safety 0.9; without the CUDA context, which is unknown)")


def test_the_estimates_own_word_wins():
    report = training_report(fits=False)
    assert not fits(report)
    assert "the peaks above are those until then" in next(row for row in peak_rows(report) if row[0] == "fits")[2]


def test_headline():
    assert headline(training_report(amp="bfloat16")) == (
        "examples/model.py: training, batch 8, float32, amp bfloat16, adamw",
        "on rtx-6000-ada (sm_89, 48.00 GiB), torch 2.14.1",
        "25.56 M parameters (97.5 MiB), 98.00 GFLOP in a forward pass",
    )
    assert headline(bare_report()) == (
        "examples/model.py: inference, batch 8, float32",
        "on h200 (sm_90, no memory limit), torch 2.14.1",
    )


def test_law():
    assert law_rows(training_report()) == (
        ("batch 1 to 3", "700.0 MiB + batch x 40.0 MiB requested at the peak"),
        ("batch from 4 on", "457.0 MiB + batch x 95.0 MiB requested at the peak"),
        ("largest batch", "480 (safety 0.05, 1.00 GiB kept for others)"),
    )
    piece = {"from_batch": 8, "to_batch": 8, "fixed_bytes": 5, "per_sample_bytes": 0}
    many = training_report(scaling={"exact": False, "pieces": [piece] * 6}, max_batch={"batch": 0})
    assert law_rows(many)[0] == ("batch 8", "5 B requested at the peak")
    assert law_rows(many)[-1] == ("largest batch", "none: not even one sample fits")
    assert len(law_lines(many)) == 2
    assert law_lines(many)[0] == "2 more ranges in --format json"


@pytest.mark.parametrize(
    ("batch", "shown"), [(1, (1, 2, 3, 4)), (3, (2, 3, 4, 5)), (5, (2, 3, 4, 5)), (9, (2, 3, 4, 5)), (0, (1, 2, 3, 4))]
)
def test_the_ranges_around_the_batch_are_shown(batch, shown):
    piece = {"to_batch": None, "fixed_bytes": 5, "per_sample_bytes": 0}
    pieces = [{**piece, "from_batch": at, "to_batch": at if at < 5 or batch == 9 else None} for at in range(1, 6)]
    report = training_report(batch=batch, scaling={"exact": True, "pieces": pieces}, max_batch=None)
    assert [int(row[0].split()[1 if "from" not in row[0] else 2]) for row in law_rows(report)] == list(shown)
    assert law_lines(report) == ("1 more range in --format json",)


def test_setup_peak():
    place = {"step": 0, "phase": "setup", "module": "", "op": None, "source": "", "tensors": []}
    assert place_rows(training_report(peak_at=place)) == (("when", "while the model is moved to the device"),)


def test_tensors_are_sorted_and_limited():
    report = training_report()
    report["peak_at"]["tensors"] = [tensor(n * MIB, "activations", (), "", "op") for n in range(1, 10)]
    rows = tensor_rows(report)
    assert [row[0] for row in rows] == ["9.0 MiB", "8.0 MiB", "7.0 MiB", "6.0 MiB", "5.0 MiB", "4.0 MiB"]
    assert rows[0][2:] == ("-", "float32", "-", "op")


def test_modules_by_depth():
    names = [row[0] for row in module_rows(training_report(), 2)]
    assert names == ["(model)", "layer1", "layer1.0"]
    assert len(module_rows(training_report(), 0)) == 1


def test_modules_are_optional():
    titles = [section.title for section in sections(training_report())]
    assert not any(title.startswith("Modules") for title in titles)
    missing = next(part for part in sections(bare_report(), 1) if part.title.startswith("Modules"))
    assert missing.lines == ("unknown: the trace lists no modules",)


def test_markdown_escapes():
    text = reporter("markdown").render(training_report(target="a|b_c"))
    assert "a\\|b\\_c" in text


def test_a_long_sentence_is_broken_and_not_cut():
    report = training_report()
    report["peak"]["device_bytes"] = None
    text = reporter("table").render(report)
    assert max(map(len, text.splitlines())) <= 100
    words = " ".join(text.split())
    assert "takes at most the 45.73 GiB left of 48.00 GiB, 1.00 GiB of it kept for others" in words


def test_flops_say_what_they_count():
    assert "FLOP: of one step, the forward and backward passes" in reporter("table", depth=1).render(training_report())
    assert "FLOP: of one step\n" in reporter("table", depth=1).render(training_report(mode="inference"))
    assert headline(training_report(mode="generation"))[-1].endswith("98.00 GFLOP in a call of generate()")


@pytest.mark.parametrize("path", ["layer1", "encoder.stages.3.blocks.17.attention.self.query_projection"])
def test_numbers_of_modules_are_whole_whatever_the_names(path):
    report = training_report()
    report["modules"] = [module(path, "ScaledDotProductAttention" * 2, 1_234_567_890, 1023 * MIB)]
    text = reporter("table", depth=9).render(report)
    assert max(map(len, text.splitlines())) <= 100
    row = next(line for line in text.splitlines() if line.startswith(f"  {path[:6]}"))
    assert row.endswith("1.23 G  4.60 GiB  1023.0 MiB  5.60 GiB  1.23 T")
    names = row.split()[:2]
    assert all(
        name.count("...") == (len(name) < len(whole)) for name, whole in zip(names, (path, "S" * 50), strict=True)
    )
    assert names[0].endswith(path[-10:])
    title = text[: text.index(row)].splitlines()[-2:]
    assert " ".join(" ".join(title).split()).endswith("parameters weights saved for at the FLOP backward peak")
    assert path in reporter("markdown", depth=9).render(report).replace("\\", "")
