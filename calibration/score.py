"""Hold estimates against measured peaks: one line a case, then the summary.

python calibration/score.py [FILE.jsonl] [--only ID,...] [--field truth_ws0]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from fxmem import api
from fxmem.workload import ConvWorkspace, Mode, Workload

ROOT = Path(__file__).parent.parent
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
MODES = {"infer": Mode.INFERENCE, "train": Mode.TRAINING, "generate": Mode.GENERATION}
DEVICES = {75: "t4", 80: "a100-80gb", 86: "a6000", 89: "rtx-4090", 90: "h200", 100: "b200", 120: "rtx-5090"}


def workload_of(args: dict, workspaces: bool = False) -> Workload:
    dtype = args.get("dtype", "fp32")
    amp = DTYPES[dtype[4:]] if dtype.startswith("amp-") else None
    return Workload(
        mode=MODES[args["mode"]], batch=args["batch"], dtype="float32" if amp else DTYPES[dtype], amp=amp,
        optimizer=args.get("optimizer", "adamw"), image=args.get("image", 224), image_given="image" in args,
        seq=args.get("seq", 128), steps=args.get("steps"), accumulate=args.get("accum", 1),
        checkpoint=args.get("checkpoint", False), channels_last=args.get("channels_last", False),
        foreach=not args.get("no_foreach", False), clip=args.get("clip", False), attn=args.get("attn"),
        model_args=tuple(args.get("override", {}).items()), new_tokens=args.get("new_tokens", 32),
        conv_workspace=ConvWorkspace.AUTO if workspaces else ConvWorkspace.NONE,
    )


def device_of(case: dict) -> str:
    return DEVICES[int((case.get("env") or {}).get("PHANTOM_SM", 90))]


def measured(truth: dict) -> tuple[int, int]:
    return tuple(max(truth[f"peak_{k}_step1"], truth.get(f"peak_{k}_steady", 0)) for k in ("alloc", "reserved"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", default=ROOT / "tests/truth/public.jsonl", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--field", default="truth_ws0")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    only = set(filter(None, options.only.split(",")))
    rows = []
    for line in options.file.read_text().splitlines():
        case = json.loads(line)
        if only and case["id"] not in only:
            continue
        args, (alloc, reserved) = case["args"], measured(case[options.field])
        began = time.perf_counter()
        try:
            e = api.estimate(args["model"], workload=workload_of(args, options.field == "truth"), device=device_of(case), law=False)
            got = (e.peak.allocated_bytes, e.peak.reserved_bytes)
            error = ""
        except Exception as exc:
            got, error = (0, 0), f"{type(exc).__name__}: {exc}".split("\n")[0][:150]
        off = tuple(g / t - 1 for g, t in zip(got, (alloc, reserved)))
        rows.append({"id": case["id"], "error": error, "allocated": got[0], "reserved": got[1], "off": off,
                     "truth": (alloc, reserved)})
        what = " ".join(str(args.get(k, "")) for k in ("model", "mode", "dtype", "batch"))
        exact = ["=" if g == t else f"{o:+.4%}" for g, t, o in zip(got, (alloc, reserved), off)]
        print(f"{case['id']:6} {what:52} {device_of(case):9} {got[0] - alloc:>12} {exact[0]:>10} {exact[1]:>10} "
              f"{time.perf_counter() - began:5.1f}s {error}", flush=True)
    both = sum(r["off"] == (0, 0) for r in rows)
    near = sum(abs(r["off"][0]) < 0.001 and abs(r["off"][1]) < 0.01 for r in rows)
    print(f"{len(rows)} cases: {both} exact in both, {sum(r['off'][0] == 0 for r in rows)} in allocated, "
          f"{near} within 0.1 % and 1 %, {sum(abs(r['off'][0]) < 0.01 for r in rows)} within 1 % allocated")
    if options.out:
        options.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    sys.exit(main())
