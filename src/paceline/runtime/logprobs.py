"""Log-probabilities for clients, from raw logits. Knows nothing of sequences or of how tokens were chosen."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms under the target's raw distribution (before penalties, bias and temperature)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # the likeliest tokens, most likely first; the chosen one need not be among them
    rank: int = 1  # of the chosen token: 1 is the likeliest


def token_logprobs(logits: torch.Tensor, token_ids: SequenceOf[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of `token_ids` and of the `num_top` likeliest tokens, from raw logits float32 [k, vocab]."""
    logprobs = torch.log_softmax(logits, dim=1)
    chosen = logprobs[range(len(token_ids)), list(token_ids)]
    ranks = ((logprobs > chosen[:, None]).sum(dim=1) + 1).tolist()
    values, indices = logprobs.topk(min(num_top, logits.shape[1]), dim=1)
    top = [list(zip(*pair, strict=True)) for pair in zip(indices.tolist(), values.tolist(), strict=True)]
    return [TokenLogprobs(*fields) for fields in zip(token_ids, chosen.tolist(), top, ranks, strict=True)]
