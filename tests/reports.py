"""Hand-made estimates, as the mapping that reporters see."""

from __future__ import annotations

import copy
from typing import Any

GIB, MIB = 2**30, 2**20

_PARTS = {
    "parameters": 98 * MIB,
    "buffers": 212_992,
    "inputs": 5 * MIB,
    "gradients": 98 * MIB,
    "optimizer_state": 196 * MIB,
    "activations": 700 * MIB,
    "outputs": 32_768,
    "temporaries": 51 * MIB,
    "workspaces": 64 * MIB,
}


def training_report(**changes: Any) -> dict[str, Any]:
    """A training run that fits its device; ``changes`` replace keys of the first level."""
    allocated = sum(_PARTS.values())
    reserved, context = allocated + 90 * MIB, 426 * MIB
    report: dict[str, Any] = {
        "schema": 1,
        "target": "examples/model.py",
        "mode": "training",
        "batch": 8,
        "dtype": "float32",
        "amp": None,
        "optimizer": "adamw",
        "torch": "2.14.1",
        "device": {"name": "rtx-6000-ada", "arch": "sm_89", "capacity_bytes": 48 * GIB},
        "peak": {"allocated_bytes": allocated, "reserved_bytes": reserved, "device_bytes": reserved + context},
        "steps": [{"allocated_bytes": allocated - 196 * MIB, "reserved_bytes": reserved - 190 * MIB}]
        + [{"allocated_bytes": allocated, "reserved_bytes": reserved}] * 2,
        "breakdown": {**_PARTS, "cached": 90 * MIB, "context": context},
        "activations": {"peak_bytes": 760 * MIB, "per_sample_bytes": 95 * MIB},
        "scaling": {
            "exact": True,
            "why": "",
            "pieces": [
                {"from_batch": 1, "to_batch": 3, "fixed_bytes": 700 * MIB, "per_sample_bytes": 40 * MIB},
                {"from_batch": 4, "to_batch": None, "fixed_bytes": 457 * MIB, "per_sample_bytes": 95 * MIB},
            ],
        },
        "peak_at": {
            "step": 2,
            "phase": "backward",
            "module": "layer1.0.conv1",
            "op": "convolution_backward.default",
            "source": "torchvision/models/resnet.py:146",
            "tensors": [
                tensor(98 * MIB, "activations", (8, 64, 112, 112), "conv1", "convolution.default"),
                tensor(24 * MIB, "activations", (8, 64, 56, 56), "layer1.0.conv1", "convolution.default"),
                tensor(9 * MIB, "gradients", (512, 512, 3, 3), "layer4.2.conv2", "convolution_backward.default"),
                tensor(9 * MIB, "parameters", (512, 512, 3, 3), "layer4.2.conv2", None),
            ],
        },
        "max_batch": {"batch": 480, "safety": 0.05, "reserved_for_others_bytes": GIB},
        "model": {"parameters": 25_557_032, "parameter_bytes": 102_228_128, "flops": 98_000_000_000},
        "modules": [
            module("", "ResNet", 25_557_032, 700 * MIB),
            module("layer1", "Sequential", 215_808, 200 * MIB),
            module("layer1.0", "Bottleneck", 75_008, 70 * MIB),
            module("layer1.0.conv1", "Conv2d", 4_096, 12 * MIB),
        ],
        "coverage": {
            "unmodelled": [],
            "lower_bound": False,
            "notes": ["cuDNN's workspaces follow its heuristics of version 9.24"],
        },
        "seconds": 1.9,
    }
    return copy.deepcopy(report) | changes


def bare_report() -> dict[str, Any]:
    """Inference of which much is not known."""
    report = training_report(
        mode="inference",
        device={"name": "h200", "arch": "sm_90", "capacity_bytes": None},
        max_batch=None,
        peak_at=None,
        model={"parameters": None, "parameter_bytes": None, "flops": None},
        modules=[],
        scaling={"exact": False, "pieces": []},
        coverage={"unmodelled": ["my_ops.fused_rope: no rule for its workspace"], "lower_bound": True, "notes": []},
    )
    report["peak"]["device_bytes"] = None
    report["steps"] = report["steps"][1:]
    report["breakdown"] |= {"gradients": 0, "optimizer_state": 0, "workspaces": 0, "context": None}
    return report


def tensor(nbytes: int, role: str, shape: tuple[int, ...], path: str, op: str | None) -> dict[str, Any]:
    kind = {"dtype": "float32", "module": path, "op": op, "name": "" if op else f"{path}.weight"}
    return {"bytes": nbytes, "role": role, "shape": list(shape), **kind}


def module(path: str, kind: str, parameters: int, saved: int) -> dict[str, Any]:
    return {
        "path": path,
        "kind": kind,
        "parameters": parameters,
        "parameter_bytes": 4 * parameters,
        "flops": 1000 * parameters,
        "saved_bytes": saved,
        "peak_bytes": saved + 4 * parameters,
    }


def batch_report(*, devices: int = 2, **changes: Any) -> dict[str, Any]:
    """The answer of ``fxmem batch``; ``changes`` replace keys of the first device."""
    report = training_report()
    following = {
        "batch": 97, "requested_bytes": 935 * MIB, "missing_bytes": 44 * MIB, "allocated_bytes": 9 * GIB,
        "segment_bytes": 936 * MIB,
        "reserved_bytes": 9 * GIB + 8 * MIB, "at": report["peak_at"],
    }  # fmt: skip
    first = {
        "name": "rtx-3060", "arch": "sm_86", "capacity_bytes": 12 * GIB, "context_bytes": None, "axis": "batch",
        "batch": 96, "bound": "memory",
        "proved": True, "safety": 0.9, "reserved_for_others_bytes": GIB, "processes": 1, "multiple_of": 1,
        "allocator_bytes": 9 * GIB + 900 * MIB, "reserved_bytes": 9 * GIB, "margin_bytes": 900 * MIB, "releases": 0,
        "traces": 0, "next": following, "scaling": report["scaling"], "curve": [],
    }  # fmt: skip
    second = {**first, "name": "t4", "arch": "sm_75", "batch": 0, "context_bytes": 0, "next": None, "proved": False}
    return {
        "schema": 1, "target": "examples/model.py", "mode": "training", "dtype": "float32", "amp": "float16",
        "optimizer": "adamw", "torch": "2.14.1", "axis": "batch", "at_batch": None, "wanted_batch": 4,
        "batch": 96, "fits": True,
        "devices": [{**first, **changes}, second][:devices], "scaling": report["scaling"],
        "coverage": {
            "unmodelled": ["CUDA context and loaded kernels: no measured size for rtx-3060"], "lower_bound": False,
            "notes": [],
        },
        "seconds": 1.5,
    }  # fmt: skip


def curve() -> list[dict[str, Any]]:
    """Memory against batch: fixed weights, activations that grow."""
    fixed = {"parameters": GIB, "optimizer_state": 2 * GIB, "gradients": GIB, "other": 64 * MIB, "workspaces": 32 * MIB}
    return [
        {"batch": batch, "parts": {**fixed, "activations": batch * 50 * MIB, "cached": batch * 4 * MIB, "context": 0}}
        for batch in (1, 32, 64, 96, 115)
    ]
