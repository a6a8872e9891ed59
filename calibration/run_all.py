"""One command for a rented GPU: receipts for a fixed set of targets, then the fit. Ten minutes at most.

  run_all.py [--device cuda:0] [--receipts calibration/receipts] [--minutes 10] [--no-fit]

A target whose receipt is there already is passed over, and one that was interrupted goes on where it was, so
the command may be killed and started again. It needs `pip install fxmem[all]` and a CUDA build of torch.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from fxmem import receipt
from fxmem.errors import FxmemError

HERE = Path(__file__).parent
LLAMA = [
    "hf:llama", "--model-arg", "hidden_size=1024", "--model-arg", "intermediate_size=2816", "--model-arg",
    "num_hidden_layers=8", "--model-arg", "num_attention_heads=16", "--model-arg", "num_key_value_heads=4",
    "--seq", "512", "--dtype", "bfloat16",
]  # fmt: skip
CASES = {
    # the most telling first: if time runs out, these are there
    "resnet50-training": ["torchvision:resnet50", "--mode", "training", "--optimizer", "sgd-momentum"],
    "gpt2-training": ["hf:gpt2", "--mode", "training"],
    "vit_b16-training": ["timm:vit_base_patch16_224", "--mode", "training"],
    "llama-training": [*LLAMA, "--mode", "training"],
    "resnet50-inference": ["torchvision:resnet50"],
    "gpt2-inference": ["hf:gpt2"],
    "vit_b16-inference": ["timm:vit_base_patch16_224"],
    "llama-inference": LLAMA,
    "resnet50-amp": ["torchvision:resnet50", "--mode", "training", "--amp", "float16", "--channels-last"],
    "gpt2-amp": ["hf:gpt2", "--mode", "training", "--amp", "bfloat16", "--optimizer", "adamw-fused"],
    "efficientnet_b0-training": ["timm:efficientnet_b0", "--mode", "training"],
    "convnext_tiny-training": ["timm:convnext_tiny", "--mode", "training"],
}
"""Name of the receipt, and the words for `fxmem calibrate`."""


def is_done(path):
    try:
        receipt.read(path)
    except FxmemError:
        return False
    return True


def run(name, words, given, left):
    path = given.receipts / f"{name}.json"
    if is_done(path):
        return "there already"
    if left <= 5:
        return "no time left"
    limit = min(left, given.limit)
    command = [sys.executable, "-m", "fxmem", "calibrate", *words, "--device", given.device, "--limit", f"{limit:g}",
               "--batches", given.batches, "--repeats", str(given.repeats), "--output", str(path)]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return f"failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    return receipt.read(path)["verdict"]


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--receipts", type=Path, default=HERE / "receipts")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--limit", type=float, default=90, help="seconds for one target")
    parser.add_argument("--batches", default="1,2,4,8")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", default="", help="names with commas between them")
    parser.add_argument("--no-fit", action="store_true", help="leave fxmem/data/profiles.json as it is")
    given = parser.parse_args(words)
    ends = time.monotonic() + 60 * given.minutes
    chosen = set(given.only.split(",")) if given.only else set(CASES)
    failed = 0
    for name, case in CASES.items():
        if name in chosen:
            said = run(name, case, given, ends - time.monotonic())
            failed += said.startswith("failed")
            print(f"{name}: {said}", flush=True)
    if not given.no_fit:
        subprocess.run([sys.executable, HERE / "fit.py", *sorted(given.receipts.glob("*.json"))], check=True,
                       env={**os.environ, "PYTHONPATH": str(HERE.parent)})  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
