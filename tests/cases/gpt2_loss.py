"""GPT-2 with its loss written out, as the language modelling script had it (huggingface/transformers#3360).

There a card of 14.73 GiB ran out of memory in 2020 at 4 samples of 1024 tokens, at a request of 786 MiB: the logits.
"""

import torch
from torch import nn


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        self.m = GPT2LMHeadModel(GPT2Config(attn_implementation="eager", use_cache=False))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.m(input_ids=ids).logits
        shifted, labels = logits[..., :-1, :].contiguous(), ids[..., 1:].contiguous()
        return nn.functional.cross_entropy(shifted.view(-1, shifted.size(-1)), labels.view(-1))


def model() -> nn.Module:
    return LanguageModel()


def inputs(batch: int) -> torch.Tensor:
    return torch.zeros(batch, 1024, dtype=torch.int64)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output
