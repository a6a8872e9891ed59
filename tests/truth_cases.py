"""Measured cases (calibration/phantom/measure.py's options) as what fxmem is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fxmem.workload import ConvWorkspace, Mode, Workload

DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
MODES = {"infer": Mode.INFERENCE, "train": Mode.TRAINING, "generate": Mode.GENERATION}
DEVICES = {75: "t4", 80: "a100-80gb", 86: "a6000", 89: "rtx-4090", 90: "h200", 100: "b200", 120: "rtx-5090"}


def cases(path: Path) -> list[dict[str, Any]]:
    """One case a line; a case that could not be measured has no figures and is left out."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [case for case in lines if "peak_alloc_step1" in case["truth_ws0"]]


def workload_of(args: dict[str, Any], *, workspaces: bool = False) -> Workload:
    """The workload that ``measure.py`` ran with these options."""
    dtype = args.get("dtype", "fp32")
    amp = DTYPES[dtype[4:]] if dtype.startswith("amp-") else None
    return Workload(
        mode=MODES[args["mode"]], batch=args["batch"], dtype="float32" if amp else DTYPES[dtype], amp=amp,
        optimizer=args.get("optimizer", "adamw"), image=args.get("image", 224), image_given="image" in args,
        seq=args.get("seq", 128), steps=args.get("steps"), accumulate=args.get("accum", 1),
        checkpoint=args.get("checkpoint", False), channels_last=args.get("channels_last", False),
        foreach=not args.get("no_foreach", False), clip=args.get("clip", False), attn=args.get("attn"),
        model_args=tuple(args.get("override", {}).items()), new_tokens=args.get("new_tokens", 32),
        zero_grad=args.get("zero_grad", "after-step"),
        conv_workspace=ConvWorkspace.AUTO if workspaces else ConvWorkspace.NONE,
    )  # fmt: skip


def device_of(case: dict[str, Any]) -> str:
    """The device of the table that stands for the measured architecture."""
    return DEVICES[int((case.get("env") or {}).get("PHANTOM_SM", 90))]


def measured(truth: dict[str, Any]) -> tuple[int, int]:
    """Peak allocated and reserved bytes: the larger of the first and the later steps."""
    allocated, reserved = (
        max(truth[f"peak_{kind}_step1"], truth.get(f"peak_{kind}_steady", 0)) for kind in ("alloc", "reserved")
    )
    return allocated, reserved
