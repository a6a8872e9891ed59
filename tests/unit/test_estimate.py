from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tapes import TapeBuilder, mlp

from fxmem.allocator import AllocatorConfig, Plan, replay
from fxmem.device import find_device
from fxmem.estimate import Estimate, MaxBatch, Question, assemble
from fxmem.law import BatchLaw, fit
from fxmem.tape import Phase, Role, Tape
from fxmem.workload import Mode, Workload

TRAINING = Workload(mode=Mode.TRAINING, batch=4, steps=2)
KEYS = {
    "schema", "target", "mode", "batch", "dtype", "amp", "optimizer", "torch", "device", "peak", "steps",
    "breakdown", "activations", "scaling", "peak_at", "max_batch", "model", "coverage", "seconds",
}  # fmt: skip
NESTED = {
    "device": {"name", "arch", "capacity_bytes"},
    "peak": {"allocated_bytes", "reserved_bytes", "device_bytes"},
    "activations": {"peak_bytes", "per_sample_bytes"},
    "scaling": {"exact", "pieces"},
    "peak_at": {"step", "phase", "module", "op", "source", "tensors"},
    "model": {"parameters", "parameter_bytes", "flops"},
    "coverage": {"unmodelled", "notes"},
}
PARTS = (
    "parameters", "buffers", "inputs", "gradients", "optimizer_state", "activations", "outputs", "temporaries",
    "workspaces", "cached", "context",
)  # fmt: skip


def answer(
    tape: Tape,
    *,
    law: BatchLaw | None = None,
    workload: Workload = TRAINING,
    device: str | None = "24GiB",
    context: int | None = 500 << 20,
    plan: Plan | None = None,
) -> Estimate:
    question = Question(target="model.py", workload=workload, device=find_device(device, context=context))
    return assemble(question, tape, replay(tape, AllocatorConfig()) if plan is None else plan, law, seconds=1.5)


def as_json(estimate: Estimate) -> dict[str, Any]:
    mapping = estimate.to_dict()
    text: dict[str, Any] = json.loads(json.dumps(mapping))
    assert text == mapping, "to_dict gives JSON's own types"
    return text


def test_the_mapping_has_the_keys_of_the_design() -> None:
    report = as_json(answer(mlp(4), law=fit([mlp(2), mlp(3), mlp(5)])))
    assert report.keys() >= KEYS
    for key, inner in NESTED.items():
        assert report[key].keys() >= inner, key
    assert tuple(report["breakdown"]) == PARTS
    assert set(report["steps"][0]) == {"allocated_bytes", "reserved_bytes"}
    assert set(report["scaling"]["pieces"][0]) == {"from_batch", "to_batch", "fixed_bytes", "per_sample_bytes"}
    assert report["peak_at"]["tensors"][0].keys() >= {"bytes", "role", "shape", "dtype", "module", "op"}
    assert report["schema"] == 1
    assert report["device"] == {"name": "24GiB", "arch": "sm_90", "capacity_bytes": 24 << 30}
    assert report["optimizer"] == "adamw"
    assert report["max_batch"] is None


def test_the_parts_sum_to_the_peaks() -> None:
    tape = mlp(4)
    report = as_json(answer(tape))
    parts, top = report["breakdown"], report["peak"]
    assert sum(parts[name] for name in PARTS[:9]) == top["allocated_bytes"] > 0
    assert sum(parts[name] for name in PARTS[:10]) == top["reserved_bytes"] == 2 << 20
    assert sum(parts[name] for name in PARTS) == top["device_bytes"] == (502 << 20)
    assert parts["parameters"] == 2 * 512
    assert len(report["steps"]) == 2
    assert max(step["allocated_bytes"] for step in report["steps"]) == top["allocated_bytes"]


def test_an_estimate_that_does_not_add_up_is_refused() -> None:
    good = answer(mlp(4))
    for peak in (
        replace(good.peak, allocated_bytes=1),
        replace(good.peak, reserved_bytes=1),
        replace(good.peak, device_bytes=None),
    ):
        with pytest.raises(ValueError, match="bytes"):
            replace(good, peak=peak)


def test_an_unknown_context_is_named_and_not_zero() -> None:
    report = as_json(answer(mlp(4), context=None))
    assert report["breakdown"]["context"] is None
    assert report["peak"]["device_bytes"] is None
    assert report["coverage"]["unmodelled"] == ["CUDA context and loaded kernels: no measured size for 24GiB"]
    assert as_json(answer(mlp(4)))["coverage"]["unmodelled"] == []


def test_the_peak_names_its_operator_and_its_largest_tensors() -> None:
    b = TapeBuilder(4).keep("w", (1000, 1000), module="fc").step()
    b.op("mm.default", reads=["w"], makes={"h": (4, 1000)}, module="fc")
    b.op("mm.default", reads=["h"], makes={"y": (4, 2000)}, scratch=1 << 20, module="head", role=Role.OUTPUT)
    place = as_json(answer(b.build(), workload=Workload(batch=4, steps=1)))["peak_at"]
    assert (place["step"], place["phase"], place["module"]) == (1, "forward", "head")
    assert (place["op"], place["source"]) == ("mm.default", "model.py:2")
    assert [tensor["bytes"] for tensor in place["tensors"]] == [4_000_000, 1 << 20, 32_000, 16_000]
    assert place["tensors"][0] == {
        "bytes": 4_000_000, "role": "parameters", "shape": [1000, 1000], "dtype": "float32", "module": "fc",
        "op": None, "name": "w",
    }  # fmt: skip
    assert place["tensors"][1]["role"] == "workspaces"


def test_at_most_twelve_tensors_are_listed() -> None:
    b = TapeBuilder(4).step()
    for index in range(20):
        b.op("make.default", makes={f"t{index}": (index + 1,)})
    estimate = answer(b.build(), workload=Workload(batch=4, steps=1))
    assert estimate.peak_at is not None
    assert len(estimate.peak_at.tensors) == 12


def test_a_peak_in_the_setup_has_step_zero() -> None:
    tape = TapeBuilder(4).keep("w", (8,)).step().build()
    place = answer(tape, workload=Workload(batch=4, steps=1)).peak_at
    assert place is not None
    assert (place.step, place.phase, place.op) == (0, Phase.SETUP, "to_device")
    bare = replace(tape, ops=())
    place = answer(bare, workload=Workload(batch=4, steps=1)).peak_at
    assert place is not None
    assert (place.step, place.phase, place.op) == (0, Phase.SETUP, None)


def test_a_peak_between_operators_names_none() -> None:
    tape = TapeBuilder(4).keep("w", (8,)).step().op("make.default", makes={"a": (800,)}, module="m").build()
    op = replace(tape.ops[1], stop=tape.ops[1].start)
    place = answer(replace(tape, ops=(tape.ops[0], op)), workload=Workload(batch=4, steps=1)).peak_at
    assert place is not None
    assert (place.step, place.phase, place.op, place.module) == (1, Phase.FORWARD, None, "m")


def test_an_empty_tape_has_no_peak() -> None:
    report = as_json(answer(TapeBuilder(4).step().build(), workload=Workload(batch=4, steps=1)))
    assert report["peak_at"] is None
    assert report["peak"]["allocated_bytes"] == 0


def test_requested_bytes_and_activations_agree_with_the_law() -> None:
    law = fit([mlp(2), mlp(3), mlp(5)])
    estimate = answer(mlp(4), law=law)
    assert estimate.peak.requested_bytes == law.requested_peak(4) <= estimate.peak.allocated_bytes
    assert estimate.peak.last_use_bytes <= estimate.peak.requested_bytes
    assert estimate.activations.per_sample_bytes == law.activation_slope(4)
    assert estimate.scaling.exact
    assert estimate.scaling.pieces == law.pieces()
    assert estimate.coverage.notes == ("the loss is the output's mean",)


def test_a_law_that_misses_this_batch_says_so() -> None:
    law = fit([mlp(2), mlp(3), mlp(5)])
    index = next(i for i, storage in enumerate(mlp(4).storages) if storage.role is Role.OUTPUT)
    tape = mlp(4)
    large = replace(tape.storages[index], nbytes=1 << 20)
    expanded = replace(tape, storages=(*tape.storages[:index], large, *tape.storages[index + 1 :]))
    notes = answer(expanded, law=law).coverage.notes
    assert "temporaries that are on no line" in notes[-1]


def test_without_a_law_the_batch_is_a_point() -> None:
    estimate = answer(mlp(4))
    assert not estimate.scaling.exact
    assert [(piece.from_batch, piece.to_batch) for piece in estimate.scaling.pieces] == [(4, 4)]
    assert estimate.scaling.pieces[0].fixed_bytes == estimate.peak.requested_bytes
    assert estimate.activations.per_sample_bytes is None


def test_a_law_that_does_not_reach_the_batch_gets_it_as_a_point() -> None:
    other = replace(mlp(8), ops=mlp(8).ops[:-1])
    estimate = answer(mlp(4), law=fit([mlp(2), other]))
    assert [(piece.from_batch, piece.to_batch) for piece in estimate.scaling.pieces] == [(2, 2), (4, 4), (8, 8)]
    assert any("not proved" in note for note in estimate.coverage.notes)


def test_a_batch_that_stands_alone_is_noted() -> None:
    one = replace(mlp(1), ops=mlp(1).ops[:-1])
    estimate = answer(mlp(4), law=fit([one, mlp(2), mlp(3), mlp(5)]))
    assert estimate.scaling.exact
    assert any("leaves out batch 1" in note for note in estimate.coverage.notes)


def test_model_counts_come_from_the_modules_or_else_from_the_storages() -> None:
    tape = mlp(4)
    model = answer(tape).model
    assert (model.parameters, model.parameter_bytes) == (96, 384)
    assert model.flops == 2 * 4 * 8 * 8 + 2 * 4 * 4 * 8
    assert model.step_flops == sum(op.flops for op in tape.ops if op.step == 1)
    assert answer(replace(tape, modules=())).model == model


def test_the_flops_of_a_forward_pass_are_those_of_one_micro_batch() -> None:
    tape = mlp(4)
    once = answer(tape).model
    twice = answer(tape, workload=replace(TRAINING, accumulate=2)).model
    assert twice.flops == once.flops // 2
    assert twice.step_flops == once.step_flops


def test_every_module_is_listed_with_whole_blocks() -> None:
    estimate = answer(mlp(4))
    assert [row.path for row in estimate.modules] == ["", "fc1", "fc2"]
    assert estimate.modules[0].peak_bytes == estimate.peak.allocated_bytes


def test_it_fits_if_the_replay_and_the_context_do() -> None:
    assert answer(mlp(4)).fits
    assert answer(mlp(4), device=None).fits is None
    assert answer(mlp(4), device="502MiB").fits
    assert answer(mlp(4), device="501MiB").fits is False


def test_what_is_missing_is_said_with_the_verdict() -> None:
    whole, part = mlp(4), replace(mlp(4), unmodelled=("nonzero()",))
    assert str(answer(whole)).endswith("fits 24GiB")
    assert str(answer(whole, context=None)).endswith("fits 24GiB if the CUDA context (unknown) does too")
    assert str(answer(part)).endswith("fits 24GiB if what is not modelled does too")
    both = answer(part, context=None)
    assert str(both).endswith("fits 24GiB if the CUDA context (unknown) and what is not modelled do too")
    assert both.coverage.lower_bound
    assert both.coverage.unmodelled[0] == "nonzero()"
    assert not answer(whole, context=None).coverage.lower_bound


def test_out_of_memory_is_reported() -> None:
    tape = TapeBuilder(4).keep("w", (1 << 20,)).step().op("make.default", makes={"a": (1 << 30,)}).build()
    plan = replay(tape, AllocatorConfig(), capacity_bytes=64 << 20)
    estimate = answer(tape, plan=plan, workload=Workload(batch=4, steps=1))
    assert estimate.fits is False
    assert (
        "out of memory: a request of 4.00 GiB failed with 4.0 MiB allocated and 20.0 MiB reserved"
        in estimate.coverage.notes[-1]
    )


def test_inference_has_no_optimizer_and_max_batch_is_set_afterwards() -> None:
    estimate = answer(mlp(4), workload=Workload(batch=4))
    assert estimate.optimizer is None
    largest = MaxBatch(batch=17, safety=0.05, reserved_for_others_bytes=0)
    report = as_json(replace(estimate, max_batch=largest))
    assert report["max_batch"] == {"batch": 17, "safety": 0.05, "reserved_for_others_bytes": 0, "proved": True}


def test_what_belongs_to_another_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="batch 4"):
        answer(mlp(2))
    with pytest.raises(ValueError, match="batch 4"):
        answer(mlp(4), plan=replay(mlp(4, steps=3), AllocatorConfig()))


def test_it_prints_as_a_sentence() -> None:
    estimate = answer(mlp(4))
    assert str(estimate) == "model.py, training, batch 4: allocated 4.5 KiB, reserved 2.0 MiB, fits 24GiB"
    assert "does not fit 24GiB" in str(replace(estimate, fits=False))
    assert str(replace(estimate, fits=None)).endswith("reserved 2.0 MiB")
    assert str(answer(mlp(4), context=None)).endswith("fits 24GiB if the CUDA context (unknown) does too")
