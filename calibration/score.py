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

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from truth_cases import cases, device_of, measured, workload_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", default=ROOT / "tests/truth/public.jsonl", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--field", default="truth_ws0")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    only = set(filter(None, options.only.split(",")))
    rows = []
    for case in cases(options.file):
        if only and case["id"] not in only:
            continue
        args, (alloc, reserved) = case["args"], measured(case[options.field])
        began = time.perf_counter()
        try:
            e = api.estimate(
                args["model"],
                workload=workload_of(args, workspaces=options.field == "truth"),
                device=device_of(case),
                law=False,
            )
            got = (e.peak.allocated_bytes, e.peak.reserved_bytes)
            error = ""
        except Exception as exc:
            got, error = (0, 0), f"{type(exc).__name__}: {exc}".split("\n")[0][:150]
        off = tuple(g / t - 1 for g, t in zip(got, (alloc, reserved)))
        rows.append(
            {
                "id": case["id"],
                "error": error,
                "allocated": got[0],
                "reserved": got[1],
                "off": off,
                "truth": (alloc, reserved),
            }
        )
        what = " ".join(str(args.get(k, "")) for k in ("model", "mode", "dtype", "batch"))
        exact = ["=" if g == t else f"{o:+.4%}" for g, t, o in zip(got, (alloc, reserved), off)]
        print(
            f"{case['id']:6} {what:52} {device_of(case):9} {got[0] - alloc:>12} {exact[0]:>10} {exact[1]:>10} "
            f"{time.perf_counter() - began:5.1f}s {error}",
            flush=True,
        )
    both = sum(r["off"] == (0, 0) for r in rows)
    near = sum(abs(r["off"][0]) < 0.001 and abs(r["off"][1]) < 0.01 for r in rows)
    print(
        f"{len(rows)} cases: {both} exact in both, {sum(r['off'][0] == 0 for r in rows)} in allocated, "
        f"{near} within 0.1 % and 1 %, {sum(abs(r['off'][0]) < 0.01 for r in rows)} within 1 % allocated"
    )
    if options.out:
        options.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    sys.exit(main())
