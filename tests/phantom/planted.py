"""GPT-2 with a leak: a hook keeps a tensor of each step alive. For ``measure.py --model py:``."""

from __future__ import annotations

import torch
import transformers

KEPT = []


def build():
    config = transformers.AutoConfig.for_model("gpt2")
    model = transformers.AutoModelForCausalLM.from_config(config)

    def hook(module, args, output):
        KEPT.append((output[0] if isinstance(output, tuple) else output).detach().clone())

    model.transformer.h[3].register_forward_hook(hook)
    return model


def inputs(options):
    ids = torch.zeros(options.batch, options.seq, dtype=torch.long).to("cuda")
    return [], {"input_ids": ids, "labels": ids}, None
