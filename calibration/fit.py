"""Turns receipts into the device profiles that fxmem ships.

  fit.py [RECEIPTS ...] [--output fxmem/data/profiles.json] [--accuracy]

Reads calibration/receipts/*.json where none are named. Receipts of the phantom device are no measurements
of a GPU: they are checked and left out. `--accuracy` prints the receipts' part of docs/accuracy.md instead.
"""

import argparse
import sys
from pathlib import Path

from tabulate import tabulate

from fxmem import receipt
from fxmem.calibration import accuracy_rows, fit, to_json

HERE = Path(__file__).parent
HEADER = ("target", "mode", "GPU", "batches", "largest error of reserved", "batches estimated too low")


def accuracy(receipts):
    rows = accuracy_rows(receipts)
    if not rows:
        return "No receipt of a real GPU is on record yet: no real figure exists."
    return tabulate(rows, headers=HEADER, tablefmt="pipe", disable_numparse=True)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("receipts", nargs="*", type=Path)
    parser.add_argument("--output", type=Path, default=HERE.parent / "fxmem" / "data" / "profiles.json")
    parser.add_argument("--accuracy", action="store_true")
    given = parser.parse_args(words)
    paths = given.receipts or sorted((HERE / "receipts").glob("*.json"))
    read = [receipt.read(path) for path in paths]
    if given.accuracy:
        print(accuracy(read))
        return
    real = [one for one in read if not one["environment"]["gpu"].get("phantom")]
    profiles = fit(real)
    receipt.write(to_json(profiles), given.output)
    print(
        f"{len(real)} receipts of real GPUs, {len(read) - len(real)} of the phantom left out: {len(profiles)} profiles",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
