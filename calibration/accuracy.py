"""Write docs/accuracy.md: estimates against every measured case, with what differs and why.

python calibration/accuracy.py            (about five minutes; the sole writer of that page)
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch

from fxmem import api

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from truth_cases import cases, device_of, measured, workload_of

TRUTH = ROOT / "tests/truth"
FAMILIES = {"torchvision": "torchvision", "timm": "timm", "hf": "transformers"}


def estimates(path: Path, field: str) -> list[dict]:
    rows = []
    for case in cases(path):
        if field not in case:
            continue
        args = case["args"]
        workload = workload_of(args, workspaces=field == "truth")
        began = time.perf_counter()
        e = api.estimate(args["model"], workload=workload, device=device_of(case), law=False)
        got, truth = (e.peak.allocated_bytes, e.peak.reserved_bytes), measured(case[field])
        family = FAMILIES[args["model"].split(":")[0]]
        rows.append(
            {"id": case["id"], "family": family, "mode": args["mode"], "device": device_of(case), "args": args,
             "got": got, "truth": truth, "off": [g / t - 1 for g, t in zip(got, truth)],
             "seconds": time.perf_counter() - began}
        )  # fmt: skip
        print(case["id"], rows[-1]["off"], file=sys.stderr)
    return rows


def percent(x: float) -> str:
    return "0" if x == 0 else f"{x:+.4%}"


def summary(rows: list[dict], by: str) -> list[str]:
    groups = defaultdict(list)
    for row in rows:
        groups[row[by], row["mode"]].append(row)
    lines = [
        f"| {by} | mode | cases | exact in both | exact in allocated | worst allocated | worst reserved | reserved under-estimated |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (name, mode), group in sorted(groups.items()):
        exact = sum(r["got"] == tuple(r["truth"]) for r in group)
        allocated = sum(r["got"][0] == r["truth"][0] for r in group)
        worst = [max((r["off"][i] for r in group), key=abs) for i in (0, 1)]
        under = sum(r["off"][1] < 0 for r in group)
        lines.append(
            f"| {name} | {mode} | {len(group)} | {exact} | {allocated} | {percent(worst[0])} | {percent(worst[1])} | {under} |"
        )
    return lines


def different(rows: list[dict], why: dict[str, dict]) -> list[str]:
    lines = ["| case | allocated | reserved | the first event that differs | why |", "| --- | --- | --- | --- | --- |"]
    for r in rows:
        if r["got"] != tuple(r["truth"]):
            a, reason = r["args"], why.get(r["id"], {})
            what = f"{r['id']}: {a['model']} {a['mode']} {a['dtype']} batch {a['batch']} on {r['device']}"
            lines.append(
                f"| {what} | {percent(r['off'][0])} | {percent(r['off'][1])} | {reason.get('event', 'not looked for')} "
                f"| {reason.get('why', 'not explained')} |"
            )
    return lines


def main() -> None:
    why = json.loads((TRUTH / "deviations.json").read_text())
    public, sweep = estimates(TRUTH / "public.jsonl", "truth_ws0"), estimates(TRUTH / "sweep.jsonl", "truth_ws0")
    planned = estimates(TRUTH / "public.jsonl", "truth")
    everything = public + sweep
    exact = sum(r["got"] == tuple(r["truth"]) for r in everything)
    off = [abs(r["off"][1]) for r in planned]
    text = [
        "# Accuracy",
        "",
        "Written by `calibration/accuracy.py`; do not edit. torch " + torch.__version__ + ".",
        "",
        "**No figure from a real GPU exists yet.** What is held against here is PyTorch's own CUDA allocator on the",
        "phantom device: the real CUDA build of PyTorch, with its dispatcher, autograd, optimizers and caching",
        "allocator, on a device that is not there (`calibration/phantom/README.md`). Kernels do not run and what is",
        "read back from the device is 0.",
        "",
        "## Without cuDNN's convolution workspaces (`--conv-workspace none`)",
        "",
        f"{exact} of {len(everything)} cases are equal to the byte in allocated *and* reserved memory. `public.jsonl` holds",
        f"{len(public)} given cases, `sweep.jsonl` {len(sweep)} that `calibration/measure_cases.py` drew at random from",
        "other models and settings. What the first 101 of these showed was mended (products of nothing, a bias added in",
        "place, checkpoints that make tensors); of the 43 that were drawn after that, 42 came out at the first try.",
        "",
        "### Given cases",
        "",
        *summary(public, "family"),
        "",
        *summary(public, "device"),
        "",
        "### Drawn cases",
        "",
        *summary(sweep, "family"),
        "",
        *summary(sweep, "device"),
        "",
        "### What differs, and why",
        "",
        *different(everything, why),
        "",
        "## With the workspaces that cuDNN names",
        "",
        "cuDNN 9.24 plans without a GPU, for the phantom as for fxmem; its choice on a real GPU depends on its version,",
        "on free memory and on `cudnn.benchmark` and is not confirmed. Given cases:",
        f"{sum(r['got'] == tuple(r['truth']) for r in planned)} of {len(planned)} equal to the byte; reserved within",
        f"{statistics.median(off):.4%} in the median and {max(off):.2%} at worst.",
        "",
        *summary(planned, "family"),
        "",
        "Where no cuDNN is installed, a table answers for common convolutions and a rule for the rest; the rule's held-out",
        "error stands in `calibration/README.md` and in `fxmem/cudnn/table.py`.",
        "",
        *(ROOT / "calibration/published.md").read_text(encoding="utf-8").splitlines(),
        "",
    ]
    (ROOT / "docs/accuracy.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
