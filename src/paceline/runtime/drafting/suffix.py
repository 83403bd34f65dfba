"""Drafting without a model: what followed the last time these tokens appeared.

Knows token ids only. Looks in the sequence's own prompt and output, and in past outputs of this server. The search is
that of LZ77 as zlib does it: a hash chain links the places where the last few tokens occurred before, most recent
first, and the longest match among them wins.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.runtime.drafting.drafter import Draft

if TYPE_CHECKING:
    from paceline.runtime.sequence import Sequence
    from paceline.runtime.verify import Verdict

MAX_MATCH = 32  # longer contexts are not told apart
MAX_CANDIDATES = 32  # the most recent places looked at, so that repetitive text costs no more than other text
_TOKEN_BITS = 20  # keys of larger ids may collide, which costs a comparison and nothing else
_SEPARATOR = -1  # between outputs of different sequences: equals no token, so no match or continuation crosses it


@dataclass(frozen=True)
class Match:
    """`length` tokens before `tokens[end]` equal the context's last ones; `tokens[end:]` is what followed."""

    length: int
    end: int


class MatchIndex:
    """Finds where the end of a context occurred before in `tokens`, a list that only grows (here or elsewhere).

    Costs O(1) per token of `tokens`, paid at the next lookup, and about 130 bytes.
    """

    def __init__(self, tokens: list[int], min_match: int):
        self.tokens = tokens
        self._min_match = min_match
        self._key_mask = (1 << (_TOKEN_BITS * min_match)) - 1
        self._key = 0  # of the min_match tokens before position len(_previous)
        self._latest: dict[int, int] = {}  # key -> last position whose preceding min_match tokens have that key
        self._previous: list[int] = []  # position -> the one before it with the same key, -1 if none

    def longest_match(self, context: SequenceOf[int]) -> Match | None:
        """The longest match of the last tokens of `context`, at least min_match long; the most recent of equals."""
        self._index_new_tokens()
        tail = context[-MAX_MATCH:]
        if len(tail) < self._min_match:
            return None
        key = 0
        for token_id in tail[-self._min_match :]:
            key = (key << _TOKEN_BITS) ^ token_id
        candidate = self._latest.get(key & self._key_mask, -1)
        best_length, best_end = self._min_match - 1, -1
        for _ in range(MAX_CANDIDATES):
            if candidate < 0 or best_length == len(tail):
                break
            length = self._match_length(candidate, tail, best_length)
            if length > best_length:
                best_length, best_end = length, candidate
            candidate = self._previous[candidate]
        return None if best_end < 0 else Match(best_length, best_end)

    def _match_length(self, end: int, tail: SequenceOf[int], to_beat: int) -> int:
        """How many tokens before `end` equal the last of `tail`; 0 if not above `to_beat`, or if nothing follows."""
        tokens = self.tokens
        if end <= to_beat or tokens[end - to_beat - 1] != tail[-to_beat - 1] or tokens[end] == _SEPARATOR:
            return 0
        longest = min(len(tail), end)
        length = 0
        while length < longest and tokens[end - length - 1] == tail[-length - 1]:
            length += 1
        return length

    def _index_new_tokens(self) -> None:
        """Enter every position that has a token, and so a continuation, under the tokens before it."""
        tokens, latest, previous = self.tokens, self._latest, self._previous
        key, mask = self._key, self._key_mask
        for position in range(len(previous), len(tokens)):
            previous.append(latest.get(key, -1))
            latest[key] = position
            key = ((key << _TOKEN_BITS) ^ tokens[position]) & mask
        self._key = key


class _Corpus:
    """Past outputs of one tenant, in two halves: where the newer is full, the older is dropped."""

    def __init__(self, min_match: int):
        self._min_match = min_match
        self.older = MatchIndex([], min_match)
        self.newer = MatchIndex([], min_match)

    def __len__(self) -> int:
        return len(self.older.tokens) + len(self.newer.tokens)

    def add(self, tokens: list[int], max_half_tokens: int) -> None:
        if len(self.newer.tokens) + len(tokens) > max_half_tokens:
            self.older, self.newer = self.newer, MatchIndex([], self._min_match)
        self.newer.tokens.extend(tokens)


class SuffixDrafter:
    """Proposes the continuation of the longest, most recent match of a sequence's last tokens.

    `max_corpus_tokens` bounds the tokens of past outputs kept (0 keeps none); the older half of them is dropped when
    the bound is reached. Requests of one `cache_salt` (a tenant) see their own past outputs only; where the bound is
    reached by all together, those unused the longest go first. `min_match` is the fewest tokens that count as a match.
    An index is built at the first proposal for a sequence, so a sequence never drafted for costs nothing and leaves
    nothing in the corpus. A proposal is determined by the context and the corpus: q is one-hot.
    """

    def __init__(self, max_corpus_tokens: int, min_match: int):
        if min_match < 1 or min_match > MAX_MATCH:
            raise ValueError(f"min_match must be from 1 to {MAX_MATCH}, got {min_match}")
        if max_corpus_tokens < 0:
            raise ValueError(f"max_corpus_tokens must not be negative, got {max_corpus_tokens}")
        self._min_match = min_match
        self._max_corpus_tokens = max_corpus_tokens
        self._indexes: dict[str, MatchIndex] = {}  # by sequence_id
        self._corpora: OrderedDict[str | None, _Corpus] = OrderedDict()  # by salt, the least recently used first

    @property
    def num_corpus_tokens(self) -> int:
        """Tokens of past outputs kept, separators included; never more than max_corpus_tokens."""
        return sum(map(len, self._corpora.values()))

    def propose(self, sequences: SequenceOf[Sequence], limits: SequenceOf[int]) -> list[Draft]:
        return [self.lookup(sequence, limit)[0] for sequence, limit in zip(sequences, limits, strict=True)]

    def lookup(self, sequence: Sequence, limit: int) -> tuple[Draft, int]:
        """A draft of at most `limit` tokens and the length of the match behind it (0 for an empty draft)."""
        if limit <= 0:
            return Draft(), 0
        own = self._indexes.get(sequence.sequence_id)
        if own is None or own.tokens is not sequence.token_ids:
            own = self._indexes[sequence.sequence_id] = MatchIndex(sequence.token_ids, self._min_match)
        best, source = own.longest_match(sequence.token_ids), own
        corpus = self._corpora.get(sequence.request.cache_salt)
        for index in (corpus.newer, corpus.older) if corpus is not None else ():
            match = index.longest_match(sequence.token_ids)
            if match is not None and (best is None or match.length > best.length):
                best, source = match, index
        if best is None:
            return Draft(), 0
        following = source.tokens[best.end : best.end + limit]
        if source is own:
            # The match ends inside the context itself: text with this period. What follows its end is its beginning.
            following = (following * (limit // len(following) + 1))[:limit]
        elif _SEPARATOR in following:
            following = following[: following.index(_SEPARATOR)]
        return Draft(following, source="suffix"), best.length

    def observe(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        """Nothing to learn: new tokens are indexed at the next proposal."""

    def release(self, sequence: Sequence) -> None:
        index = self._indexes.pop(sequence.sequence_id, None)
        if index is not None and sequence.finished and sequence.num_output_tokens:
            self._remember(sequence)

    def _remember(self, sequence: Sequence) -> None:
        """Add an output, with the end of its prompt for its first tokens to be found by."""
        room = self._max_corpus_tokens // 2 - 1
        if room < 1:
            return
        start = max(0, sequence.num_prompt_tokens - MAX_MATCH)
        output = [*sequence.token_ids[start:][-room:], _SEPARATOR]
        salt = sequence.request.cache_salt
        corpus = self._corpora.setdefault(salt, _Corpus(self._min_match))
        self._corpora.move_to_end(salt)
        corpus.add(output, self._max_corpus_tokens // 2)
        while self.num_corpus_tokens > self._max_corpus_tokens:
            self._corpora.popitem(last=False)
