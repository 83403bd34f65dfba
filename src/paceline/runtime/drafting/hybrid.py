"""Suffix matches where they promise more, the draft model elsewhere.

Knows how often drafts of each kind were accepted lately and what they cost. Knows nothing of how either is made.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.runtime.drafting.drafter import Draft
from paceline.runtime.drafting.model import ModelDrafter
from paceline.runtime.drafting.suffix import SuffixDrafter
from paceline.runtime.speedup import CostTable, speedup

if TYPE_CHECKING:
    from paceline.runtime.sequence import Sequence
    from paceline.runtime.verify import Verdict

_MEMORY_TOKENS = 200.0  # judgements remembered; older ones fade
_PRIOR_TOKENS = 10.0  # how many judgements the prior is worth
_MODEL_PRIOR = 0.8


@dataclass
class AcceptanceRate:
    """A running estimate of the probability that a draft token is accepted given that those before it were.

    A mean of the judged tokens (accepted ones, and the first rejected of a draft; those after it were not judged), in
    which older ones fade, starting from `prior`.
    """

    prior: float
    num_judged: float = 0.0
    num_accepted: float = 0.0

    @property
    def value(self) -> float:
        return (self.num_accepted + self.prior * _PRIOR_TOKENS) / (self.num_judged + _PRIOR_TOKENS)

    def update(self, num_accepted: int, num_draft_tokens: int) -> None:
        num_judged = min(num_accepted + 1, num_draft_tokens)
        self.fade(num_judged)
        self.num_judged += num_judged
        self.num_accepted += num_accepted

    def fade(self, num_tokens: int) -> None:
        """Let `num_tokens` tokens' worth of what was learnt go."""
        keep = max(0.0, 1.0 - num_tokens / _MEMORY_TOKENS)
        self.num_judged *= keep
        self.num_accepted *= keep


class HybridDrafter:
    """For each sequence, whichever of a suffix match and the draft model has the higher expected speedup.

    The estimate for a suffix match depends on its length in powers of two. Suffix proposals that were not chosen are
    judged too, against the tokens that came, so their estimate never goes stale; the model's fades towards its prior
    while it is passed over, so it is tried again. `costs` are those of the draft model; a suffix lookup is taken to
    cost nothing.
    """

    def __init__(self, suffix: SuffixDrafter, model: ModelDrafter, costs: CostTable):
        self._suffix = suffix
        self._model = model
        self._model_costs = costs
        self._suffix_costs = CostTable(costs.target_seconds, 0.0, costs.overhead_seconds)
        self._model_rate = AcceptanceRate(_MODEL_PRIOR)
        self._suffix_rates: dict[int, AcceptanceRate] = {}  # by bit length of the match length
        self._offers: dict[str, tuple[Draft, int]] = {}  # by sequence_id: the last suffix proposal and its match length

    def propose(self, sequences: SequenceOf[Sequence], limits: SequenceOf[int]) -> list[Draft]:
        drafts: list[Draft] = []
        for_model: list[int] = []
        for index, (sequence, limit) in enumerate(zip(sequences, limits, strict=True)):
            offer, match_length = self._suffix.lookup(sequence, limit)
            self._offers[sequence.sequence_id] = (offer, match_length)
            drafts.append(offer)
            if limit > 0 and self._prefers_model(offer, match_length, limit):
                for_model.append(index)
        proposals = self._model.propose([sequences[i] for i in for_model], [limits[i] for i in for_model])
        for index, proposal in zip(for_model, proposals, strict=True):
            if len(proposal):  # the model may have no room; the match is better than nothing
                drafts[index] = proposal
        return drafts

    def observe(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        if draft.source == "draft" and len(draft):
            self._model_rate.update(verdict.num_accepted, len(draft))
        offer, match_length = self._offers.pop(sequence.sequence_id, (Draft(), 0))
        offered = offer.token_ids[: len(verdict.token_ids)]
        if offered:
            num_right = 0
            while num_right < len(offered) and offered[num_right] == verdict.token_ids[num_right]:
                num_right += 1
            self._suffix_rate(match_length).update(num_right, len(offered))
        self._suffix.observe(sequence, draft, verdict)
        self._model.observe(sequence, draft, verdict)

    def release(self, sequence: Sequence) -> None:
        self._offers.pop(sequence.sequence_id, None)
        self._suffix.release(sequence)
        self._model.release(sequence)

    def _prefers_model(self, offer: Draft, match_length: int, limit: int) -> bool:
        if not len(offer):
            return True
        suffix_speedup = speedup([self._suffix_rate(match_length).value] * len(offer), self._suffix_costs)
        prefers_model = speedup([self._model_rate.value] * limit, self._model_costs) > suffix_speedup
        if not prefers_model:
            self._model_rate.fade(1)
        return prefers_model

    def _suffix_rate(self, match_length: int) -> AcceptanceRate:
        """The estimate for matches about this long. Before any evidence, longer ones are trusted more: a match of L
        tokens is L successes of the same prediction, (L + 1) / (L + 2) by Laplace's rule."""
        bucket = match_length.bit_length()
        if bucket not in self._suffix_rates:
            typical_length = 1 << (bucket - 1)
            self._suffix_rates[bucket] = AcceptanceRate((typical_length + 1) / (typical_length + 2))
        return self._suffix_rates[bucket]
