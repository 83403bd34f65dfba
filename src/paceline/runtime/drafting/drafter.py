"""The drafter protocol: who proposes, what a proposal is, how it learns the verdict."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from paceline.runtime.sequence import Sequence
    from paceline.runtime.verify import Verdict


@dataclass(frozen=True)
class Draft:
    """Tokens proposed to follow a sequence's known tokens.

    `probabilities` is float32 [len(token_ids), vocab]: the distribution q each token was *sampled* from. None means
    one-hot q: the token was chosen deterministically given the context (and, for coupled requests, given the noise).
    """

    token_ids: list[int] = field(default_factory=list)
    probabilities: torch.Tensor | None = None
    source: str = "none"  # "draft" | "suffix" | "forced" | "prediction": where from, for metrics and colours

    def __len__(self) -> int:
        return len(self.token_ids)


class Drafter(Protocol):
    def propose(self, sequences: SequenceOf[Sequence], limits: SequenceOf[int]) -> list[Draft]:
        """Draft at most `limits[i]` tokens (may be 0) for each of `sequences`, batched."""
        ...

    def observe(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        """Learn what became of a draft. Called after the verdict's tokens were appended to the sequence."""
        ...

    def release(self, sequence: Sequence) -> None:
        """The sequence is over (finished, cancelled, preempted): drop what is kept for it. Idempotent."""
        ...
