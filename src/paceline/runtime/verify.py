"""What is accepted: which draft tokens stand, and which token of the target follows them.

The functions are pure, randomness is an argument. Knows nothing of how logits become a distribution
(`sampling.py`) or of how drafts are made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from paceline.runtime.drafting.drafter import Draft
from paceline.runtime.sampling import SamplingKernels, sample_index, shape_logits

if TYPE_CHECKING:
    from paceline.runtime.sequence import Sequence

T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """The outcome of a round: `token_ids` are `num_accepted` draft tokens, then exactly one token of the target (the
    recovered token after a rejection, the bonus token otherwise)."""

    num_accepted: int
    token_ids: list[int]


class OnDemand(Generic[T]):
    """Entries computed when read: after a rejection nothing is paid for the rest of a draft."""

    def __init__(self, compute: Callable[[int], T]):
        self._compute = compute

    def __getitem__(self, index: int) -> T:
        return self._compute(index)


def verify_match(draft_token_ids: SequenceOf[int], target_token_ids: SequenceOf[int] | OnDemand[int]) -> Verdict:
    """Accept the draft as far as it equals what the target chooses at each position.

    `target_token_ids` has len(draft) + 1 entries: entry i is the target's choice given known + draft[:i]. They are read
    in order and none after the first difference. The result is target_token_ids[: num_accepted + 1], that is, exactly
    what plain decoding would have chosen, by induction: entry i is conditioned on the tokens plain decoding would have
    had as long as all earlier draft tokens matched. This serves greedy requests (choice = argmax) and coupled ones
    (choice = Gumbel-max with noise fixed by seed and position; Daliri, Musco and Suresh, arXiv 2408.07978).
    """
    for index, token_id in enumerate(draft_token_ids):
        chosen = target_token_ids[index]
        if chosen != token_id:
            return Verdict(index, [*draft_token_ids[:index], chosen])
    return Verdict(len(draft_token_ids), [*draft_token_ids, target_token_ids[len(draft_token_ids)]])


def verify_rejection(
    draft: Draft, target_probabilities: torch.Tensor | OnDemand[torch.Tensor], uniforms: SequenceOf[float]
) -> Verdict:
    """Accept draft token x_i with probability min(1, p_i(x_i) / q_i(x_i)); at the first rejection draw from the
    normalised positive part of p_i - q_i, and after full acceptance from p_k.

    `target_probabilities` is float32 [k + 1, vocab]: row i is the target's distribution p_i given known + draft[:i].
    Rows are read in order and none after the first rejection.
    `uniforms` are k + 1 independent numbers in [0, 1). q_i is row i of `draft.probabilities` (float32 [k, any width];
    ids beyond either width have probability 0), one-hot on x_i where that is None.

    The output has the target's distribution (Leviathan, Kalman and Matias, arXiv 2211.17192; Chen et al., arXiv
    2302.01318). Proof, for one position: x is drawn from q and accepted with min(1, p/q), so token t comes out accepted
    with probability q(t) min(1, p(t)/q(t)) = min(p(t), q(t)). Rejection has probability 1 - Σ min(p, q), which is
    Σ (p - q)+ since p = min(p, q) + (p - q)+ sums to 1; given rejection t is drawn with probability
    (p(t) - q(t))+ / Σ (p - q)+. Together: min(p(t), q(t)) + (p(t) - q(t))+ = p(t), whatever q is. If the token was
    accepted the next position is the same argument given that token; if not, the next round starts there. A one-hot q
    is the case q(x) = 1: accept with p(x), otherwise draw from p without x.
    """
    for index, token_id in enumerate(draft.token_ids):
        target = target_probabilities[index]
        p = _probability(target, token_id)
        q = 1.0 if draft.probabilities is None else _probability(draft.probabilities[index], token_id)
        if not uniforms[index] * q < p:
            recovered = sample_index(_residual(draft, index, target), uniforms[-1])
            return Verdict(index, [*draft.token_ids[:index], recovered])
    bonus = sample_index(target_probabilities[len(draft)], uniforms[-1])
    return Verdict(len(draft), [*draft.token_ids, bonus])


def _probability(probabilities: torch.Tensor, token_id: int) -> float:
    return float(probabilities[token_id]) if token_id < len(probabilities) else 0.0


def _residual(draft: Draft, index: int, target: torch.Tensor) -> torch.Tensor:
    """(p - q)+ at the rejected position `index`, not normalised; p itself should rounding leave nothing."""
    residual = target.clone()
    if draft.probabilities is None:
        residual[draft.token_ids[index] : draft.token_ids[index] + 1] = 0.0
    else:
        width = min(len(residual), draft.probabilities.shape[1])
        residual[:width] -= draft.probabilities[index, :width]
        residual.clamp_(min=0.0)
    return residual if float(residual.amax()) > 0.0 else target


def expected_acceptance(target: torch.Tensor, drafted: torch.Tensor) -> tuple[float, float]:
    """The probability that one token drafted from q is accepted, as (rejection, coupled), both exact.

    `target` and `drafted` are p and q, float [vocab], each summing to 1. Rejection accepts with Σ min(p, q) = 1 - TV,
    the most any method can. Coupled by Gumbel-max accepts when one token wins both races:
    Σ_t 1 / Σ_s max(p(s)/p(t), q(s)/q(t)), at least (1 - TV) / (1 + TV) (Daliri, Musco and Suresh, arXiv 2408.07978).
    """
    p, q = target.double(), drafted.double()
    possible = (p > 0) | (q > 0)
    p, q = p[possible], q[possible]
    # max(p(s)/p(t), q(s)/q(t)) is the first exactly where p(s)/q(s) >= p(t)/q(t): sorted by that ratio, the sum over s
    # is a sum of p above t and a sum of q below it.
    order = (p / q).argsort(descending=True)
    p, q = p[order], q[order]
    races = p.cumsum(0) / p + (q.sum() - q.cumsum(0)) / q
    both = (p > 0) & (q > 0)
    return float(torch.minimum(p, q).sum()), float((1.0 / races[both]).sum())


class Verifier:
    """Judges the drafts of a step's sequences, each by its request's mode.

    `generator` is the randomness of requests without a seed. `eos_token_ids` are those `min_tokens` holds back.
    """

    def __init__(self, kernels: SamplingKernels, generator: np.random.Generator, eos_token_ids: Collection[int]):
        self._kernels = kernels
        self._generator = generator
        self._eos_token_ids = frozenset(eos_token_ids)

    def verify_batch(
        self,
        sequences: SequenceOf[Sequence],
        drafts: SequenceOf[Draft],
        logits: torch.Tensor,
        offsets: SequenceOf[int],
    ) -> list[Verdict]:
        """One verdict per sequence. `logits` is float32 [m, vocab], raw and left untouched; sequence i owns rows
        offsets[i] : offsets[i] + len(drafts[i]) + 1. An empty draft is plain decoding, by the same path."""
        verdicts: list[Verdict | None] = [None] * len(sequences)
        plain_greedy: list[int] = []
        for index, (sequence, draft, offset) in enumerate(zip(sequences, drafts, offsets, strict=True)):
            raw = logits[offset : offset + len(draft) + 1]
            if sequence.sampling.mode != "greedy" or sequence.grammar is not None:
                verdicts[index] = self._verify_row_by_row(sequence, draft, raw)
                continue
            shaped = shape_logits(raw, sequence, draft.token_ids, self._eos_token_ids)
            if shaped is raw:
                plain_greedy.append(index)
            else:
                verdicts[index] = verify_match(draft.token_ids, self._kernels.argmax(shaped))
        if plain_greedy:
            self._verify_plain_greedy(plain_greedy, drafts, logits, offsets, verdicts)
        return verdicts

    def _verify_row_by_row(self, sequence: Sequence, draft: Draft, logits: torch.Tensor) -> Verdict:
        """Shapes no row after the first difference: for where shaping a row costs much."""

        def shaped(index: int) -> torch.Tensor:
            row = logits[index : index + 1]
            return shape_logits(row, sequence, draft.token_ids[:index], self._eos_token_ids)

        if sequence.sampling.mode == "rejection":
            uniforms = self._generator.random(len(draft) + 1).tolist()
            return verify_rejection(draft, OnDemand(lambda i: torch.softmax(shaped(i), dim=1)[0]), uniforms)
        if sequence.sampling.mode == "greedy":
            return verify_match(draft.token_ids, OnDemand(lambda i: self._kernels.argmax(shaped(i))[0]))
        seed, first = sequence.sampling.seed, sequence.num_output_tokens
        choices = OnDemand(lambda i: self._kernels.gumbel_argmax(shaped(i), seed, [first + i])[0])
        return verify_match(draft.token_ids, choices)

    def _verify_plain_greedy(
        self,
        indices: list[int],
        drafts: SequenceOf[Draft],
        logits: torch.Tensor,
        offsets: SequenceOf[int],
        verdicts: list[Verdict | None],
    ) -> None:
        """One argmax over the rows of all greedy sequences with nothing to shape; fills in their verdicts."""
        rows = [row for i in indices for row in range(offsets[i], offsets[i] + len(drafts[i]) + 1)]
        choices = self._kernels.argmax(logits if len(rows) == logits.shape[0] else logits[rows])
        chosen = dict(zip(rows, choices, strict=True))
        for i in indices:
            target = [chosen[row] for row in range(offsets[i], offsets[i] + len(drafts[i]) + 1)]
            verdicts[i] = verify_match(drafts[i].token_ids, target)
