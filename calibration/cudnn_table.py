"""Write fxmem/data/cudnn_workspaces.json.xz: cuDNN's workspaces for the convolutions of common models.

    python calibration/cudnn_table.py --other .../libcudnn.so.9 [--other ...]

Needs a CUDA build of torch's cuDNN beside the running Python (no GPU), torchvision and timm; takes five minutes.
It traces the models, asks cuDNN for every direction, dtype and layout that PyTorch would ask for, and states two
errors, both as fractions of the bytes of x + w + y that 90 % of the answers lie within:
`versions`, how far other cuDNN versions (--other, repeatable: paths to their libraries) answer differently, and
`rule`, how far the rule is off for the convolutions of models that are held out. Nothing else writes this file.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import sys
import warnings
from dataclasses import replace
from pathlib import Path

warnings.filterwarnings("ignore")

from fxmem.api import trace
from fxmem.cudnn.process import find_library, plan
from fxmem.cudnn.question import Convolution, Direction
from fxmem.cudnn.sizes import operands, parts, spread
from fxmem.cudnn.table import Table, encode, read
from fxmem.cudnn.target import description
from fxmem.errors import FxmemError
from fxmem.kernels.conv_workspace import tape_questions
from fxmem.kernels.steps import Target

FILE = Path(__file__).parents[1] / "fxmem" / "data" / "cudnn_workspaces.json.xz"
ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)
BATCHES = (1, 8, 32, 128)
HELD_OUT_BATCHES = (1, 2, 8, 16, 48, 64)
SAMPLE = 3000

TORCHVISION = (
    "resnet18 resnet34 resnet50 resnet101 resnext50_32x4d wide_resnet50_2 vgg11 vgg16 alexnet squeezenet1_0 densenet121 "
    "mobilenet_v2 mobilenet_v3_large mobilenet_v3_small efficientnet_b0 efficientnet_b1 efficientnet_b4 efficientnet_v2_s "
    "convnext_tiny convnext_base regnet_y_400mf regnet_y_8gf shufflenet_v2_x1_0 mnasnet1_0 googlenet inception_v3@299 "
    "vit_b_16 vit_l_16 swin_t"
)
TIMM = (
    "resnet26d resnet50d seresnext50_32x4d mobilenetv3_large_100 efficientnet_b0 efficientnet_lite0 tf_efficientnetv2_s "
    "convnext_tiny convnextv2_tiny regnety_016 vit_small_patch16_224 vit_large_patch14_224 vit_small_patch32_224 "
    "swin_tiny_patch4_window7_224 resnetv2_50"
)
HELD_OUT = (
    "hrnet_w18 dla34 xception41 mixnet_s repvgg_a2 mobilevit_s coatnet_0_rw_224 edgenext_small mobilenetv2_100 fbnetc_100 "
    "tinynet_a res2net50_26w_4s selecsls42b hardcorenas_a lcnet_100 skresnet18 nfnet_l0 regnetx_032 ghostnet_100 rexnet_100 "
    "cspdarknet53 maxvit_tiny_tf_224 pvt_v2_b0 poolformer_s12 ese_vovnet39b dpn68 efficientnet_b3"
)


def convolutions(names: list[str]) -> list[Convolution]:
    """The distinct convolutions of models' forward passes, as forward questions at batch 1."""
    found: dict[Convolution, None] = {}
    for name in names:
        target, _, image = name.partition("@")
        options = {"image": int(image)} if image else {}
        try:
            tape = trace(target, batch=2, steps=1, channels_last=True, dtype="float16", **options).tape
        except FxmemError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        for q in tape_questions([tape], Target(sm=90, sm_count=132)):
            plain = replace(q, direction=Direction.FORWARD, dtype="float32", channels_last=False, x=(1, *q.x[1:]))
            found[plain] = None
    return list(found)


def rows() -> list[tuple[Direction, str, bool]]:
    """Float16 before bfloat16, which is written as its difference."""
    dtypes = ("float32", "float16", "bfloat16")
    return [(d, dtype, layout) for d in Direction for dtype in dtypes for layout in (False, True)]


def asked(conv: Convolution, dtype: str, channels_last: bool) -> bool:
    """Whether PyTorch may ask: row-major depthwise ones only in float16, and no other than square, 1, 3 or 5."""
    if channels_last or conv.groups == 1 or conv.w[1] != 1:
        return True
    return dtype == "float16" and conv.w[2] == conv.w[3] and conv.w[2] in (1, 3, 5) and conv.x[1] >= 32


def variants(convs: list[Convolution], batches: tuple[int, ...]) -> list[list[Convolution | None]]:
    """For each row the questions, convolution by convolution and batch by batch."""
    return [
        [
            replace(c, direction=d, dtype=dtype, channels_last=layout, x=(b, *c.x[1:]))
            if asked(c, dtype, layout)
            else None
            for c in convs
            for b in batches
        ]
        for d, dtype, layout in rows()
    ]


def ask(library: str, sm: int, questions: list[Convolution]) -> dict[Convolution, int]:
    questions = [q for q in questions if not (q.dtype == "bfloat16" and sm < 80)]
    found = plan(library, description(sm), questions, seconds=600)
    if found.reason:
        print(f"sm_{sm}, {library}: {found.reason}", file=sys.stderr)
    return {q: n for q, n in zip(questions, found.workspaces, strict=True) if n is not None}


def answers(sm: int, library: str, convs: list[Convolution]) -> dict[str, tuple[str, str, list[int]]]:
    """The rows of an architecture, as the file has them."""
    grid = variants(convs, BATCHES)
    known = ask(library, sm, [q for row in grid for q in row if q is not None])
    written, decoded = {}, {}
    for (direction, dtype, layout), row in zip(rows(), grid, strict=True):
        name = f"{direction} {dtype} {'nhwc' if layout else 'nchw'}"
        decoded[name] = [parts(known[q], operands(q)) if q in known else None for q in row]
        written[name] = encode(
            decoded[name], decoded[name.replace("bfloat16", "float16")] if dtype == "bfloat16" else None
        )
    return written


def versions_error(sm: int, library: str, others: list[str], convs: list[Convolution]) -> tuple[float, float]:
    questions = [q for row in variants(convs, (8, 32)) for q in row if q is not None]
    sample = random.Random(3).sample(questions, SAMPLE)
    base = ask(library, sm, sample)
    pairs, sizes, same = [], [], 0
    for other in others:
        theirs = ask(other, sm, sample)
        both = [q for q in sample if q in base and q in theirs]
        pairs += [(base[q], theirs[q]) for q in both]
        sizes += [sum(operands(q)) for q in both]
    same = sum(abs(a - b) < 512 for a, b in pairs) / max(len(pairs), 1)
    low, high = spread(pairs, sizes)
    total = sum(b for _, b in pairs) / max(sum(a for a, _ in pairs), 1)
    print(f"sm_{sm} other versions: {same:.1%} equal, sum {total:.3f} of ours, 90 % within {low:+.2f} .. {high:+.2f}")
    return round(low, 3), round(high, 3)


def rule_error(sm: int, library: str, table: Table, held: list[Convolution]) -> tuple[float, float]:
    questions = [q for row in variants(held, HELD_OUT_BATCHES) for q in row if q is not None]
    sample = random.Random(1).sample(questions, min(SAMPLE, len(questions)))
    known = ask(library, sm, sample)
    pairs = [(table.infer(q), n) for q, n in known.items()]
    low, high = spread(pairs, [sum(operands(q)) for q in known])
    exact = sum(abs(a - b) < 512 for a, b in pairs) / len(pairs)
    off, real = sum(abs(a - b) for a, b in pairs), sum(b for _, b in pairs)
    bias = sum(a - b for a, b in pairs) / real
    print(
        f"sm_{sm} rule, {len(pairs)} held-out questions: {exact:.1%} to 512 bytes, sum of errors {off / real:.1%} of the "
        f"sum, bias {bias:+.1%}, 90 % within {low:+.2f} .. {high:+.2f} of x + w + y"
    )
    return round(low, 3), round(high, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", action="append", default=[], help="another version's libcudnn")
    parser.add_argument("--arch", type=int, action="append", help="only these")
    options = parser.parse_args()
    found = find_library()
    if found is None or found.version is None:
        raise SystemExit("no cuDNN beside this Python")
    convs = convolutions([f"torchvision:{n}" for n in TORCHVISION.split()] + [f"timm:{n}" for n in TIMM.split()])
    known = set(convs)
    held = [c for c in convolutions([f"timm:{n}" for n in HELD_OUT.split()]) if c not in known]
    print(f"{len(convs)} convolutions, {len(held)} held out, cuDNN {found.version}")
    shapes = [(c.x[1:], c.w, c.stride, c.padding, c.dilation) for c in convs]
    made = {"schema": 1, "cudnn": found.version, "batches": BATCHES, "convolutions": shapes, "architectures": {}}
    for sm in options.arch or ARCHITECTURES:
        own = {"versions": (0, 0), "rule": (0, 0), "answers": answers(sm, found.path, convs)}
        made["architectures"][str(sm)] = own
        own["rule"] = rule_error(sm, found.path, read(made, sm), held)
        own["versions"] = versions_error(sm, found.path, options.other, convs)
    packed = lzma.compress(json.dumps(made, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME)
    FILE.write_bytes(packed)
    print(f"{FILE}: {len(packed)} bytes")


if __name__ == "__main__":
    main()
