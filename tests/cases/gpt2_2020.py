"""GPT-2 as run_language_modeling.py trained it in March 2020 (huggingface/transformers#3360, torch 1.4).

Out of memory at 4 samples of 1024 tokens in float32 on a card of 14.73 GiB, at a request of 786 MiB with 13.33 GiB
allocated. The model gave its loss, its logits and every layer's keys and values, which the script kept until the next
step; gradients were zeroed in place: ``--zero-grad in-place``.
"""

import torch
from softmax_2021 import attention_saves_scores, log_softmax
from torch import Tensor, nn
from torch.nn import functional


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        self.m = GPT2LMHeadModel(GPT2Config(attn_implementation="eager"))

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        with attention_saves_scores():
            output = self.m(input_ids=ids)
        logits, presents = output.logits, output.past_key_values
        shifted, labels = logits[..., :-1, :].contiguous(), ids[..., 1:].contiguous()
        loss = functional.nll_loss(log_softmax(shifted.view(-1, shifted.size(-1))), labels.view(-1))
        return loss, logits, presents


def model() -> nn.Module:
    return LanguageModel()


def inputs(batch: int) -> Tensor:
    return torch.zeros(batch, 1024, dtype=torch.int64)


def loss(output: tuple[Tensor, ...]) -> Tensor:
    return output[0]
