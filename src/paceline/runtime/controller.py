"""How many tokens to draft for each sequence of a step. Knows requests' wishes, not how drafts are made or verified."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from paceline.runtime.sequence import Sequence


class Controller(Protocol):
    def limits(self, sequences: SequenceOf[Sequence], free_rows: int) -> list[int]:
        """The most tokens to draft for each of `sequences` (0: none), together at most `free_rows`.

        All of them have speculation enabled and at least one output token: time to first token never pays for drafts.
        """
        ...


class FixedController:
    """`num_draft_tokens` for every sequence, or what its request says; `num_predicted_tokens` for one whose output
    follows its request's prediction. When rows are scarce all get an equal share, and what one does not need goes to
    those after it."""

    def __init__(self, num_draft_tokens: int, num_predicted_tokens: int = 15):
        if num_draft_tokens < 0:
            raise ValueError(f"num_draft_tokens must not be negative, got {num_draft_tokens}")
        self._num_draft_tokens = num_draft_tokens
        self._num_predicted_tokens = max(num_draft_tokens, num_predicted_tokens)

    def limits(self, sequences: SequenceOf[Sequence], free_rows: int) -> list[int]:
        granted: list[int] = []
        for index, sequence in enumerate(sequences):
            wanted = sequence.request.speculation.num_draft_tokens
            if wanted is None:
                follows = sequence.prediction is not None and sequence.prediction.follows
                wanted = self._num_predicted_tokens if follows else self._num_draft_tokens
            share = free_rows // (len(sequences) - index)
            granted.append(min(wanted, share))
            free_rows -= granted[-1]
        return granted
