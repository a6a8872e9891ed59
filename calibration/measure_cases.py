"""Measure many cases on the phantom device (or a GPU), one fresh process each; resumable.

python calibration/measure_cases.py OUT.jsonl [--seed 1] [--count 120] [--zero-grad in-place]

Draws models of several families with random settings and appends one line a case, in the form
of tests/truth/public.jsonl. PHANTOM_PYTHON and PHANTOM_BUILD as in calibration/phantom/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
TORCHVISION = """resnet18 resnet34 resnet101 resnext50_32x4d wide_resnet50_2 vgg11 vgg16 alexnet squeezenet1_1 googlenet
 inception_v3 densenet161 densenet169 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large shufflenet_v2_x1_0 mnasnet1_0
 efficientnet_b1 efficientnet_v2_s regnet_y_400mf regnet_x_800mf convnext_small vit_b_32 vit_l_16 swin_s swin_v2_t maxvit_t
 fcn_resnet50 deeplabv3_resnet50 lraspp_mobilenet_v3_large fasterrcnn_resnet50_fpn retinanet_resnet50_fpn
 maskrcnn_resnet50_fpn ssd300_vgg16 fcos_resnet50_fpn""".split()
SMALL = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1408}
GQA = {**SMALL, "num_key_value_heads": 4}
HF: dict[str, dict[str, object]] = {
    "gpt2": {}, "bert": {}, "distilbert": {}, "roberta": {}, "albert": {}, "electra": {}, "opt": {"hidden_size": 512,
    "ffn_dim": 2048, "num_hidden_layers": 4, "num_attention_heads": 8, "word_embed_proj_dim": 512},
    "gpt_neo": {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "attention_types": [[["global", "local"], 2]]},
    "gpt_neox": SMALL, "bloom": {"hidden_size": 512, "n_layer": 4, "n_head": 8}, "llama": GQA, "mistral": GQA,
    "qwen2": GQA, "qwen3": GQA, "phi": SMALL, "phi3": {**GQA, "pad_token_id": 0}, "gemma": {**GQA, "head_dim": 64},
    "gemma2": {**GQA, "head_dim": 64}, "falcon": {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8},
    "mixtral": GQA, "olmo": GQA, "stablelm": GQA, "starcoder2": GQA, "cohere": GQA, "gpt_bigcode": {"n_embd": 512,
    "n_layer": 4, "n_head": 8}, "codegen": {"n_embd": 512, "n_layer": 4, "n_head": 8, "rotary_dim": 32},
    "gptj": {"n_embd": 512, "n_layer": 4, "n_head": 8, "rotary_dim": 32}, "t5": {}, "mt5": {"num_layers": 4, "num_decoder_layers": 4}, "bart": {}, "vit": {}, "deit": {},
    "beit": {}, "swin": {}, "convnext": {}, "dinov2": {}, "segformer": {}, "mobilevit": {}, "resnet": {}, "mamba": {"hidden_size": 256, "num_hidden_layers": 4},
}  # fmt: skip
TIMM = """vit_tiny_patch16_224 deit_small_patch16_224 convnext_nano efficientnet_b2 tf_efficientnetv2_b0 mobilenetv3_large_100
 resnetv2_50 seresnet50 regnetx_016 nfnet_f0 mixer_s16_224 gmlp_s16_224 swin_tiny_patch4_window7_224 beit_base_patch16_224
 coatnet_0_rw_224 maxvit_tiny_rw_224 pvt_v2_b1 twins_svt_small levit_256 mobilevit_s poolformer_s12 cait_xxs24_224
 xcit_nano_12_p16_224 ghostnet_100 hrnet_w18 dla34 res2net50_26w_4s skresnet34 eca_nfnet_l0 edgenext_small focalnet_tiny_srf
 crossvit_tiny_240 visformer_tiny davit_tiny eva02_tiny_patch14_224 mambaout_tiny fastvit_t8""".split()
DTYPES = ["fp32", "fp16", "bf16", "amp-fp16", "amp-bf16"]
OPTIMIZERS = ["sgd", "sgd-momentum", "adam", "adamw", "adamw-fused"]


def draw(rng: random.Random) -> dict[str, object]:
    family = rng.choice(["torchvision", "torchvision", "hf", "hf", "timm"])
    train = rng.random() < 0.6
    args: dict[str, object] = {"mode": "train" if train else "infer", "dtype": rng.choice(DTYPES),
                               "batch": rng.choice([1, 2, 2, 4, 4, 8]), "steps": 3 if train else 2}  # fmt: skip
    if train:
        args["optimizer"] = rng.choice(OPTIMIZERS)
    if family == "hf":
        name = rng.choice(list(HF))
        args.update(model=f"hf:{name}", seq=rng.choice([64, 128, 384, 512]))
        if HF[name]:
            args["override"] = HF[name]
        if rng.random() < 0.15:
            args["attn"] = "eager"
        if train and rng.random() < 0.1:
            args["checkpoint"] = True
    else:
        args.update(model=f"{family}:{rng.choice(TORCHVISION if family == 'torchvision' else TIMM)}", image=224)
        if "crossvit" in str(args["model"]):
            args["image"] = 240
        if "maxvit_t" == str(args["model"]).split(":")[1]:
            args["image"] = 224
        if rng.random() < 0.1:
            args["channels_last"] = True
    for key, chance in (("clip", 0.07), ("no_foreach", 0.05)):
        if train and rng.random() < chance and args.get("optimizer") != "adamw-fused":
            args[key] = True
    if train and rng.random() < 0.06:
        args["accum"] = 2
    return {
        "args": args,
        "env": rng.choice(
            [
                {},
                {},
                {},
                {},
                {"PHANTOM_SM": 75},
                {"PHANTOM_SM": 80},
                {"PHANTOM_SM": 86},
                {"PHANTOM_SM": 89},
                {"PHANTOM_SM": 100},
                {"PHANTOM_SM": 120},
            ]
        ),
    }


def options_of(args: dict[str, object]) -> list[str]:
    words: list[str] = []
    for key, value in args.items():
        option = "--" + key.replace("_", "-")
        if value is True:
            words.append(option)
        else:
            words += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--zero-grad", help="only trainings, with measure.py's --zero-grad at this")
    parser.add_argument("--limit", type=int, default=240, help="seconds a case")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    done = len(options.out.read_text().splitlines()) if options.out.exists() else 0
    for i in range(options.count):
        case = draw(rng)
        if options.zero_grad:
            while case["args"]["mode"] != "train":
                case = draw(rng)
            case["args"]["zero_grad"] = options.zero_grad
        if i < done:
            continue
        command = [
            str(HERE / "phantom/phantom_run"),
            str(HERE / "phantom/measure.py"),
            *options_of(case["args"]),
            "--keep-outputs",
        ]
        env = {**os.environ, "PHANTOM_CUDNN": "stub", **{k: str(v) for k, v in case["env"].items()}}
        try:
            run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=options.limit)
            truth = json.loads(run.stdout.strip().splitlines()[-1])
        except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
            truth = {"error": f"{type(error).__name__}"}
        keep = ("error", "alloc_model", "reserved_model", "peak_alloc_step1", "peak_alloc_steady", "peak_reserved_step1",
                "peak_reserved_steady", "num_alloc_retries", "sm", "torch")  # fmt: skip
        line = {"id": f"s{options.seed}-{i:03}", **case, "truth_ws0": {k: truth[k] for k in keep if k in truth}}
        with options.out.open("a") as f:
            f.write(json.dumps(line) + "\n")
        print(line["id"], case["args"]["model"], line["truth_ws0"].get("error", "")[:80], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
