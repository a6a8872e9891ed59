"""BERT-large for sequence classification at 512 tokens, eager attention: the model of transformers' memory anatomy."""

import torch
from torch import nn


def model() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return BertForSequenceClassification(BertConfig(attn_implementation="eager", **sizes))


def inputs(batch: int) -> torch.Tensor:
    return torch.zeros(batch, 512, dtype=torch.int64)


def loss(output) -> torch.Tensor:
    logits = output.logits
    return nn.functional.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))
