"""Drafts from what the client says the output may look like (OpenAI's Predicted Outputs).

Knows the predicted tokens and the output so far. The output follows the prediction, leaves it at an edit and comes
back to it, as two versions of a file do; a drafter has to notice both within a few tokens.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict, deque
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from paceline.runtime.drafting.drafter import Draft

if TYPE_CHECKING:
    from paceline.runtime.sequence import Sequence

_MAX_MATCH = 16  # tokens looked at to tell places apart
_MAX_CANDIDATES = 64  # places looked at, those nearest to where the output was lost
# A place is believed if its match is long enough for its distance d (in tokens): length - log2(1 + d / 16) must reach
# this. One token is enough within 3 tokens of the expected place, two within 22, three within 60, six within 600.
_LEAST_SCORE = 0.75
_DISTANCE_UNIT = 16.0
_GROWTH = 4  # a draft is this many times as long as the run of tokens that came as predicted


class PredictionTracker:
    """Where an output stands in its prediction. `advance` with the output's tokens as they come; `draft` what follows.

    `num_matched` counts output tokens that came as predicted, in the prediction's order.
    """

    def __init__(self, token_ids: SequenceOf[int]):
        self._tokens = list(token_ids)
        self._places: dict[int, list[int]] | None = None  # token -> positions after its occurrences, ascending
        self._position = 0  # of the token expected next; while lost, where the output was lost
        self._run = 0  # tokens in a row that came as predicted, up to here
        self._num_lost = 0  # output tokens since the output was lost; 0: it is where it is expected
        self._tail: deque[int] = deque(maxlen=_MAX_MATCH)  # of the output
        self.num_matched = 0

    @property
    def follows(self) -> bool:
        """Whether it is known where in the prediction the output stands."""
        return self._num_lost == 0 and self._position < len(self._tokens)

    def advance(self, token_ids: SequenceOf[int]) -> None:
        """Take new tokens of the output."""
        for token_id in token_ids:
            self._tail.append(token_id)
            if self._position < len(self._tokens) and self._tokens[self._position] == token_id:
                # Where it was expected: on the way, or after tokens that were only inserted.
                self._position += 1
                self._run += 1
                self.num_matched += 1
                self._num_lost = 0
                continue
            self._num_lost += 1
            place, self._run = self._find()
            if place is not None:
                self._position, self._num_lost = place, 0
                self.num_matched += 1

    def draft(self, limit: int) -> list[int]:
        """At most `limit` tokens: more, the longer all came as predicted; none where the output is lost."""
        if not self.follows:
            return []
        length = min(limit, _GROWTH * max(self._run, 1))
        return self._tokens[self._position : self._position + length]

    def _find(self) -> tuple[int | None, int]:
        """The best place to go on from, and how many tokens speak for it; None if no place is convincing."""
        if self._places is None:
            places: dict[int, list[int]] = defaultdict(list)
            for position, token_id in enumerate(self._tokens, start=1):
                places[token_id].append(position)
            self._places = dict(places)
        low, high = self._position, self._position + self._num_lost  # after an insertion, after a replacement
        candidates = self._places.get(self._tail[-1], [])
        nearest = bisect.bisect_left(candidates, low)
        best_score, best, best_length = _LEAST_SCORE, None, 0
        for place in candidates[max(0, nearest - _MAX_CANDIDATES // 2) : nearest + _MAX_CANDIDATES // 2]:
            length = self._match_length(place)
            distance = max(low - place, place - high, 0)
            score = length - math.log2(1.0 + distance / _DISTANCE_UNIT)
            if score >= best_score and (score > best_score or best is None):
                best_score, best, best_length = score, place, length
        return best, best_length

    def _match_length(self, place: int) -> int:
        """How many of the output's last tokens equal those before `place`."""
        longest = min(place, len(self._tail))
        length = 0
        while length < longest and self._tokens[place - 1 - length] == self._tail[-1 - length]:
            length += 1
        return length


def predicted_draft(sequence: Sequence, limit: int) -> Draft:
    """What the request's prediction says comes next, at most `limit` tokens; often nothing."""
    token_ids = sequence.prediction.draft(limit) if sequence.prediction is not None else []
    return Draft(token_ids, source="prediction") if token_ids else Draft()
