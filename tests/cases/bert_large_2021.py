"""``bert_large.py`` as PyTorch ran it until 1.10: every softmax saved its input; with ``--zero-grad in-place``."""

import bert_large
import torch
from bert_large import inputs, loss  # noqa: F401 - the target's own
from softmax_2021 import attention_saves_scores
from torch import nn


class Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = bert_large.model()

    def forward(self, ids: torch.Tensor) -> object:
        with attention_saves_scores():
            return self.m(ids)


def model() -> nn.Module:
    return Old()
