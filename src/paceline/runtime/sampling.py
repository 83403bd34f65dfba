"""What the target distribution is: sampling parameters, how they shape logits, and drawing from the result.

Knows the arithmetic of one row of logits at a time: no result here depends on which other rows are in the batch. Knows
nothing of drafts being right or wrong (`verify.py`), of scheduling, or of where logits come from.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from paceline.errors import RequestError
from paceline.runtime.grammar import GrammarMatcher, GrammarSpec

if TYPE_CHECKING:
    from paceline.runtime.sequence import Sequence

GREEDY_BELOW_TEMPERATURE = 1e-5  # as vLLM: below this the softmax is one-hot in float32 anyway
_INT64 = (1 << 63) - 1

# field: (type, lowest, highest, lowest itself allowed)
_BOUNDS: dict[str, tuple[type, float, float, bool]] = {
    "temperature": (float, 0.0, 100.0, True),
    "top_p": (float, 0.0, 1.0, False),
    "top_k": (int, -1, _INT64, True),
    "min_p": (float, 0.0, 1.0, True),
    "presence_penalty": (float, -2.0, 2.0, True),
    "frequency_penalty": (float, -2.0, 2.0, True),
    "repetition_penalty": (float, 0.01, 100.0, True),
    "seed": (int, -_INT64 - 1, _INT64, True),
    "max_tokens": (int, 1, _INT64, True),
    "min_tokens": (int, 0, _INT64, True),
    "n": (int, 1, 128, True),
    "logprobs": (int, 0, 20, True),
    "prompt_logprobs": (int, 0, 20, True),
}
_MAX_ENTRIES = 1024
_OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
# Every entry costs time at every token, for all requests of a batch: their number is bounded.
_TYPES: dict[str, tuple[type, str]] = {
    "logit_bias": (Mapping, f"a mapping of at most {_MAX_ENTRIES} entries from token id to bias"),
    "stop": (tuple, f"a tuple of at most {_MAX_ENTRIES} non-empty strings"),
    "stop_token_ids": (tuple, f"a tuple of at most {_MAX_ENTRIES} token ids"),
    "bad_words": (tuple, f"a tuple of at most {_MAX_ENTRIES} non-empty tuples of token ids"),
    "ignore_eos": (bool, "true or false"),
    "skip_special_tokens": (bool, "true or false"),
    "include_stop_str_in_output": (bool, "true or false"),
}


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop, with the names and meanings of the OpenAI and vLLM APIs.

    Out-of-range or mistyped values raise RequestError naming the field. `top_k` 0 or -1 is off. `logprobs` counts the
    alternatives returned besides the chosen token; None returns none at all; `prompt_logprobs` is the same for tokens
    of the prompt. `bad_words` are runs of token ids, none of which becomes part of the output; it is made of
    `allowed_token_ids` (None: of all). With a `grammar` the output ends where the grammar is complete, which leaves
    `min_tokens` and `ignore_eos` no meaning: both are refused.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        for name, (kind, low, high, low_allowed) in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                _check_number(name, value, kind, low, high, low_allowed)
        for name, (kind, noun) in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, kind) or (kind is not bool and len(value) > _MAX_ENTRIES):
                raise _refusal(name, noun, value)
        for token_id, bias in self.logit_bias.items():
            _check_number("logit_bias", token_id, int, 0, _INT64)
            _check_number("logit_bias", bias, float, -100.0, 100.0)
        allowed = self.allowed_token_ids
        if allowed is not None and not (isinstance(allowed, tuple) and allowed):
            raise _refusal("allowed_token_ids", "a tuple of at least one token id", allowed)
        lists = [("stop_token_ids", self.stop_token_ids), ("allowed_token_ids", allowed or ())]
        for name, token_ids in (*lists, *(("bad_words", word) for word in self.bad_words)):
            for token_id in token_ids:
                _check_number(name, token_id, int, 0, _INT64)
        if not all(self.bad_words):
            raise _refusal("bad_words", _TYPES["bad_words"][1], self.bad_words)
        if not all(isinstance(text, str) and text for text in self.stop):
            raise _refusal("stop", _TYPES["stop"][1], self.stop)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"`min_tokens` must be at most `max_tokens` ({self.max_tokens}), got {self.min_tokens}.",
                "lower `min_tokens` or raise `max_tokens`",
                field="min_tokens",
            )
        if self.grammar is not None:
            for name in ("min_tokens", "ignore_eos"):
                if getattr(self, name):
                    raise RequestError(
                        f"`{name}` cannot be combined with `{self.grammar.field}`: the grammar says where the output "
                        "ends.",
                        f"leave out `{name}`, or let the grammar ask for more text",
                        field=name,
                    )

    @property
    def mode(self) -> Literal["greedy", "coupled", "rejection"]:
        """How tokens are drawn and drafts verified: no randomness, seeded noise, or the engine's own randomness."""
        if self.temperature < GREEDY_BELOW_TEMPERATURE:
            return "greedy"
        return "rejection" if self.seed is None else "coupled"

    def for_choice(self, index: int) -> SamplingParams:
        """The parameters of choice `index` of `n`: its own seed if seeded. Choice 0 is what `n=1` would have given."""
        if self.seed is None or index == 0:
            return self if self.n == 1 else replace(self, n=1)
        return replace(self, n=1, seed=_mix(self.seed + index * _GOLDEN) >> 1)


def _check_number(name: str, value: object, kind: type, low: float, high: float, low_allowed: bool = True) -> None:
    """Raise RequestError unless `value` is a finite `kind` in [low, high] (or (low, high]). A bool is no number."""
    accepted = (int,) if kind is int else (int, float)
    typed = isinstance(value, accepted) and not isinstance(value, bool)
    if typed and (low <= value if low_allowed else low < value) and value <= high:
        return
    noun = "an integer" if kind is int else "a number"
    above = "at least" if low_allowed else "above"
    bound = f"{above} {low}" + f" and at most {'2^63 - 1' if high == _INT64 else high}"
    raise _refusal(name, f"{noun} {bound}", value)


def _refusal(name: str, wanted: str, value: object) -> RequestError:
    shown = repr(value) if len(repr(value)) <= 100 else repr(value)[:97] + "..."
    hint = f"give `{name}` a value as described, or leave it out for the default"
    return RequestError(f"`{name}` must be {wanted}, got {shown}.", hint, field=name)


# --- drawing -----------------------------------------------------------------------------------------------------

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MAX_NOISE = -math.log(-math.log(1 - 2.0**-25))  # 17.33; the least is -2.85


class SamplingKernels(Protocol):
    """Reductions of logits rows to token ids. Rows are independent: row i's result depends on row i alone."""

    def argmax(self, logits: torch.Tensor) -> list[int]:
        """The most likely token of each row of float32 [k, vocab]; the lowest id among equals."""
        ...

    def gumbel_argmax(self, logits: torch.Tensor, seed: int, positions: SequenceOf[int]) -> list[int]:
        """Sample each row of float32 [k, vocab] from its softmax, with noise that depends only on `seed`,
        `positions[i]` (the index of the token in the output, 0 = first generated) and the token id."""
        ...

    def logprobs(self, logits: torch.Tensor, token_ids: SequenceOf[int]) -> list[float]:
        """log_softmax(logits[i])[token_ids[i]] for each row of float32 [k, vocab]."""
        ...


class TorchSamplingKernels:
    """The reference kernels.

    The noise, exactly. All integers are unsigned, 64 bits, wrapping; >> is the logical shift; seed is taken mod 2^64.

        GOLDEN = 0x9E3779B97F4A7C15
        mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
        row   = mix(mix(seed) + (position + 1) * GOLDEN)
        bits  = mix(row + (token_id + 1) * GOLDEN) >> 40                          (24 bits)
        u     = (bits + 0.5) * 2^-24                                              (float64; exact)
        noise = float32(-log(-log(u)))                                            (float64 logarithms, rounded once)
        score = logit + noise                                                     (float32)

    The token with the highest score wins, the lowest id among equals; -inf never wins. This is SplitMix64 (Steele, Lea
    and Flood 2014) read at index token_id, and the Gumbel-max trick: the winner is distributed as softmax(logits).
    Noise lies in [-2.86, 17.33], so tokens less likely than about 3e-8 cannot win; nothing else is approximate.
    """

    def argmax(self, logits: torch.Tensor) -> list[int]:
        if logits.device.type == "cpu":
            return logits.numpy().argmax(axis=1).tolist()  # vectorised, unlike torch's: ten times faster
        return logits.argmax(dim=1).tolist()

    def gumbel_argmax(self, logits: torch.Tensor, seed: int, positions: SequenceOf[int]) -> list[int]:
        states = torch.tensor(noise_states(seed, positions), dtype=torch.int64, device=logits.device)
        highest, winners = logits.max(dim=1)
        # The likeliest token's score is a bound: a token cannot win if even the largest noise leaves it below that.
        # One per cent of slack covers the rounding of the sum. Few tokens remain, and only they pay for noise.
        bound = highest + _gumbel_noise(states, winners)
        candidate_rows, token_ids = torch.nonzero(logits >= (bound - 1.01 * _MAX_NOISE)[:, None], as_tuple=True)
        scores = logits[candidate_rows, token_ids] + _gumbel_noise(states[candidate_rows], token_ids)
        counts = torch.bincount(candidate_rows, minlength=len(states)).tolist()
        winners = winners.tolist()
        start = 0
        for row, count in enumerate(counts):
            if count:  # a row of NaN has no candidates
                winners[row] = int(token_ids[start + int(scores[start : start + count].argmax())])
            start += count
        return winners

    def logprobs(self, logits: torch.Tensor, token_ids: SequenceOf[int]) -> list[float]:
        chosen = torch.tensor(list(token_ids), dtype=torch.int64, device=logits.device)[:, None]
        return torch.log_softmax(logits, dim=1).gather(1, chosen)[:, 0].tolist()


def noise_states(seed: int, positions: SequenceOf[int]) -> list[int]:
    """The int64 state of each row's noise: `row` in the formula of TorchSamplingKernels."""
    base = _mix(seed)
    return [_signed(_mix(base + (position + 1) * _GOLDEN)) for position in positions]


def sample_index(weights: torch.Tensor, uniform: float) -> int:
    """Draw an index of `weights` (float [vocab], not negative, any positive sum) with a uniform number in [0, 1).

    Inverse transform in float64. An index of weight 0 is never drawn.
    """
    cumulative = torch.cumsum(weights, dim=0, dtype=torch.float64)
    index = int(torch.searchsorted(cumulative, cumulative[-1:] * uniform, right=True))
    return min(index, len(weights) - 1)


def _mix(z: int) -> int:
    """SplitMix64's finaliser on a Python integer, taken mod 2^64."""
    z &= _MASK
    z = ((z ^ (z >> 30)) * _MULTIPLIERS[0]) & _MASK
    z = ((z ^ (z >> 27)) * _MULTIPLIERS[1]) & _MASK
    return z ^ (z >> 31)


def _signed(z: int) -> int:
    """The int64 with the bits of the unsigned 64-bit `z`."""
    return z - (1 << 64) if z > _INT64 else z


def _gumbel_noise(states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The noise of TorchSamplingKernels, elementwise: int64 row states and token ids to float32. torch has no
    unsigned 64-bit arithmetic; int64 wraps the same, and a mask makes its arithmetic shift a logical one."""

    def xor_shift(z: torch.Tensor, bits: int) -> torch.Tensor:
        return z ^ ((z >> bits) & ((1 << (64 - bits)) - 1))

    z = states + (token_ids + 1) * _signed(_GOLDEN)
    z = xor_shift(z, 30) * _signed(_MULTIPLIERS[0])
    z = xor_shift(z, 27) * _signed(_MULTIPLIERS[1])
    bits = (xor_shift(z, 31) >> 40) & ((1 << 24) - 1)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform)).to(torch.float32)


# --- shaping -----------------------------------------------------------------------------------------------------


def shape_logits(
    logits: torch.Tensor, sequence: Sequence, draft_token_ids: SequenceOf[int], eos_token_ids: Collection[int]
) -> torch.Tensor:
    """Turn raw logits into those of the distribution to sample from, p = softmax of the result.

    `logits` is float32 [k, vocab]. The last row follows the known tokens and the whole draft, the row before it all
    but the last draft token, and so on: with k = len(draft) + 1, row i follows known + draft[:i].

    In this order: repetition penalty (over prompt, output and draft prefix, as transformers and vLLM), frequency and
    presence penalties (over output and draft prefix, as OpenAI), logit bias, allowed tokens (others become -inf), bad
    words (what would complete one becomes -inf), `min_tokens` (EOS and stop ids become -inf), grammar (what it refuses
    becomes -inf), temperature, top-k, top-p, min-p. Greedy requests skip the last four: they cannot change the argmax.
    Tokens as likely as the last one kept are kept too, so the result does not depend on a sorting order. Ids outside
    the vocabulary of `logits` (a draft model's may be smaller) are skipped.

    Returns `logits` itself when nothing applies, otherwise a new tensor; never writes to `logits`.
    """
    sampling = sequence.sampling
    shaped = logits
    if sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
        shaped = shaped.clone()
        _penalize(shaped, sequence, draft_token_ids)
    biases = {i: bias for i, bias in sampling.logit_bias.items() if i < logits.shape[1]}
    if biases:
        shaped = shaped.clone() if shaped is logits else shaped
        bias = torch.tensor(list(biases.values()), dtype=torch.float32, device=logits.device)
        shaped[:, list(biases)] += bias
    if sampling.allowed_token_ids is not None:
        allowed = [i for i in sampling.allowed_token_ids if i < logits.shape[1]]
        kept = torch.full_like(logits, -math.inf)
        kept[:, allowed] = shaped[:, allowed]
        shaped = kept
    if sampling.bad_words:
        shaped = shaped.clone() if shaped is logits else shaped
        _forbid_words(shaped, sequence, draft_token_ids)
    first_index = sequence.num_output_tokens + len(draft_token_ids) + 1 - logits.shape[0]
    if first_index < sampling.min_tokens:
        shaped = shaped.clone() if shaped is logits else shaped
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
        shaped[: sampling.min_tokens - first_index, [i for i in ends if i < logits.shape[1]]] = -math.inf
    if sequence.grammar is not None:
        shaped = _keep_allowed(shaped, sequence.grammar, draft_token_ids)
    if sampling.mode == "greedy":
        return shaped
    if sampling.temperature != 1.0:
        # Shifted so that the largest is 0: a small temperature then overflows to -inf only, where it means zero.
        highest = shaped.amax(dim=1, keepdim=True)
        shaped = shaped - highest if shaped is logits else shaped.sub_(highest)
        shaped /= sampling.temperature
    if sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0:
        shaped = _keep_likely(shaped, sampling)
    return shaped


def _penalize(logits: torch.Tensor, sequence: Sequence, draft_token_ids: SequenceOf[int]) -> None:
    """Apply the repetition, frequency and presence penalties to `logits` in place, touching only tokens seen."""
    sampling = sequence.sampling
    history = np.fromiter((*sequence.token_ids, *draft_token_ids), dtype=np.int64)
    token_ids, columns = np.unique(history, return_inverse=True)
    num_known, num_rows = len(sequence.token_ids), logits.shape[0]
    in_prompt = np.bincount(columns[: sequence.num_prompt_tokens], minlength=len(token_ids)) > 0
    in_output = np.bincount(columns[sequence.num_prompt_tokens : num_known], minlength=len(token_ids))
    counts = np.tile(in_output, (num_rows, 1))  # [k, tokens seen]
    first_row = len(draft_token_ids) + 1 - num_rows
    for index, column in enumerate(columns[num_known:]):
        counts[max(index + 1 - first_row, 0) :, column] += 1
    inside = token_ids < logits.shape[1]
    token_ids, counts, in_prompt = token_ids[inside], counts[:, inside], in_prompt[inside]

    device = logits.device
    where = torch.from_numpy(token_ids).to(device)
    seen = logits[:, where]
    repeated = torch.where(seen > 0, seen / sampling.repetition_penalty, seen * sampling.repetition_penalty)
    seen = torch.where(torch.from_numpy(in_prompt | (counts > 0)).to(device), repeated, seen)
    penalties = sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    logits[:, where] = seen - torch.from_numpy(penalties.astype(np.float32)).to(device)


def _forbid_words(logits: torch.Tensor, sequence: Sequence, draft_token_ids: SequenceOf[int]) -> None:
    """Give -inf in place to each token that would complete a bad word at the end of the output and draft prefix."""
    words = [word for word in sequence.sampling.bad_words if word[-1] < logits.shape[1]]
    longest = max(map(len, words), default=1)
    num_rows = logits.shape[0]
    num_before = len(draft_token_ids) + 1 - num_rows  # draft tokens before the first row
    start = max(sequence.num_prompt_tokens, len(sequence.token_ids) + num_before - longest + 1)
    tail = [*sequence.token_ids[start:], *draft_token_ids]
    for row in range(num_rows):
        before = tail[: len(tail) - (num_rows - 1 - row)]
        completing = [word[-1] for word in words if before[len(before) - len(word) + 1 :] == list(word[:-1])]
        logits[row, completing] = -math.inf


def _keep_allowed(
    logits: torch.Tensor, grammar: GrammarMatcher, draft_token_ids: SequenceOf[int]
) -> torch.Tensor:
    """A copy of `logits` with all that the grammar refuses at -inf; only what it allows is read."""
    rows = logits.cpu().numpy()
    kept = np.full_like(rows, -math.inf)
    first_row = len(draft_token_ids) + 1 - len(rows)
    for index, (row, kept_row) in enumerate(zip(rows, kept, strict=True)):
        allowed = grammar.allowed(draft_token_ids[: first_row + index], len(row))
        np.copyto(kept_row, row, where=True if allowed is None else allowed)
    return torch.from_numpy(kept).to(logits.device)


def _keep_likely(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """A copy of `logits` with all that top-k, top-p and min-p drop at -inf. numpy on the CPU: several times faster
    than torch at one row of 150,000 entries, and free of its thread barriers."""
    rows = logits.cpu().numpy()
    kept = np.full_like(rows, -math.inf)
    for row, kept_row in zip(rows, kept, strict=True):
        token_ids = np.flatnonzero(row >= _lowest_kept_logit(row, sampling))
        kept_row[token_ids] = row[token_ids]
    return torch.from_numpy(kept).to(logits.device)


def _lowest_kept_logit(row: np.ndarray, sampling: SamplingParams) -> float:
    """The smallest entry of `row` (float32 [vocab], divided by the temperature) that top-k, top-p and min-p keep."""
    kept, cutoff, highest = row, -math.inf, float(row.max())
    if not math.isfinite(highest):
        return cutoff  # a broken model's row: nothing sensible to drop
    if 0 < sampling.top_k < len(row):
        cutoff = float(np.partition(row, -sampling.top_k)[-sampling.top_k])
        kept = row[row >= cutoff]
    if sampling.top_p < 1.0:
        total = float(np.exp(kept - highest).sum())
        # Tokens below this weigh less than 1 - top_p all together: the nucleus lies among the others, often a hundred
        # out of 150,000, and only those are sorted.
        lowest = highest + min(0.0, math.log1p(-sampling.top_p) + math.log(total / len(kept)))
        ordered = np.sort(kept[kept >= lowest])[::-1]
        cumulative = np.cumsum(np.exp(ordered - highest), dtype=np.float64)
        cutoff = float(ordered[min(int(np.searchsorted(cumulative, sampling.top_p * total)), len(ordered) - 1)])
    if sampling.min_p > 0.0:
        cutoff = max(cutoff, highest + math.log(sampling.min_p))
    return cutoff
