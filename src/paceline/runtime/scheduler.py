"""Which sequences run, and how many rows each gets in a step. Knows token counts and KV blocks, never token values.

There is no prefill phase and no decode phase: every running sequence has *computed* tokens and *known* ones, and a step
lets the first catch up with the second, within a budget of rows. A sequence that lacks one token is decoding and may
bring drafted tokens along; one that lacks more is a prompt (or a preempted sequence coming back), computed in chunks.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from paceline.runtime.drafting.drafter import Draft
from paceline.runtime.kv_cache import KVCache, OutOfBlocks
from paceline.runtime.sequence import Sequence

_NO_DRAFT = Draft()
MAX_LOGPROB_ROWS = 64  # of a prompt in one step: a row of logits takes 0.6 MB at a vocabulary of 150,000


@dataclass(frozen=True)
class Turn:
    """What one sequence does in a step: compute its next `num_known` known tokens, then the drafted ones."""

    sequence: Sequence
    num_known: int
    draft: Draft
    yields_token: bool  # after this, all known tokens are computed: the last row's logits give a new token

    @property
    def num_rows(self) -> int:
        return self.num_known + len(self.draft)

    @property
    def num_logit_rows(self) -> int:
        """Rows at the end of this turn whose logits are wanted: those that judge the draft and give the token after
        it, and those that give log-probabilities of the prompt."""
        wanted = (1 + len(self.draft)) if self.yields_token else 0
        first_missing = self.sequence.num_prompt_tokens - self.sequence.num_prompt_logprobs_missing
        if first_missing < self.sequence.num_prompt_tokens:
            # The row before a token gives its log-probability.
            wanted = max(wanted, self.sequence.num_computed_tokens + self.num_rows - (first_missing - 1))
        return min(wanted, self.num_rows)


def total_tokens(sequence: Sequence) -> int:
    """The most tokens a sequence can come to: prompt and `max_tokens`, which the engine has filled in."""
    return sequence.num_prompt_tokens + sequence.sampling.max_tokens


def num_missing(sequence: Sequence) -> int:
    """Known tokens whose K and V are not computed yet."""
    return len(sequence.token_ids) - sequence.num_computed_tokens


def _rank(sequence: Sequence) -> tuple[int, float, int]:
    """Who goes first: priority, then arrival. Also, reversed, who is preempted first."""
    return sequence.request.priority, sequence.stats.arrived_at, sequence.index


class Scheduler:
    """The waiting and running queues, both in order of rank.

    Admission is strictly in that order, so nobody starves behind those that fit more easily. A sequence is admitted if
    `max_batch_size` and `total_token_limit` (sum of prompt and max_tokens of all running; None: no limit) allow, and
    if there are KV blocks for it: under `guaranteed_no_evict` for all tokens it can come to, under `max_utilization`
    for those known now. Then a running sequence may later find no block, and the running one of last rank is
    preempted: it loses its blocks and waits to be computed again.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        *,
        row_budget: int,
        max_batch_size: int,
        total_token_limit: int | None,
        enable_chunked_prefill: bool,
        guaranteed_no_evict: bool,
        on_preempt: Callable[[Sequence], None],
    ):
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._kv_cache = kv_cache
        self._row_budget = row_budget
        self._max_running = min(max_batch_size, row_budget)  # so that each can have a row in every step
        self._total_token_limit = total_token_limit
        self._enable_chunked_prefill = enable_chunked_prefill
        self._guaranteed_no_evict = guaranteed_no_evict
        self._on_preempt = on_preempt
        self._blocked = False  # the first waiting sequence did not fit, and nobody has left since
        self._left_out = False  # prompts took the last step's rows from sequences that were decoding

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_rank)
        self._blocked = False

    def add_fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` run on the blocks of `parent`, whose prompt is computed. If there is no room now it waits like
        any other, and has its prompt computed or found in the prefix cache later."""
        num_shared = child.num_prompt_tokens - 1  # the last one's logits are wanted
        table = self._kv_cache.fork(parent.block_table)
        self._kv_cache.truncate(table, child.num_prompt_tokens)
        if not self._admit(child, table, num_shared):
            self.add(child)

    def remove(self, sequence: Sequence) -> None:
        """The sequence is over: forget it and let go of its blocks."""
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        self._kv_cache.release(sequence.block_table)
        self._blocked = False

    def schedule(self) -> tuple[list[Sequence], int]:
        """Admit who fits. Returns the running sequences that lack one token only, and how many rows drafts may take.

        While prompts have tokens to compute, drafts leave them half of the rows (all they can use where chunks are
        not allowed), so that neither side starves.
        """
        while self.waiting and not self._blocked and len(self.running) < self._max_running:
            sequence = self.waiting[0]
            if not self._admit(sequence, *self._cached_prefix(sequence)):
                self._blocked = True
                break
            self.waiting.pop(0)
        decoding = [sequence for sequence in self.running if num_missing(sequence) == 1]
        free_rows = self._row_budget - len(decoding)
        num_prefill = sum(map(num_missing, self.running)) - len(decoding)
        most_prefill = (free_rows + 1) // 2 if self._enable_chunked_prefill else free_rows
        return decoding, free_rows - min(num_prefill, most_prefill)

    def _cached_prefix(self, sequence: Sequence) -> tuple[list[int], int]:
        """Blocks that hold the beginning of the sequence; none where the logits of the prompt are wanted."""
        if sequence.num_prompt_logprobs_missing:
            return [], 0
        return self._kv_cache.match_prefix(sequence.token_ids, sequence.request.cache_salt)

    def allot(self, decoding: SequenceOf[Sequence], drafts: SequenceOf[Draft]) -> list[Turn]:
        """Give out the rows of this step, and the KV blocks for them.

        Sequences that lack one token come first, then their drafts, cut where rows or blocks end, then prompts. With
        chunked prefill off prompts come first, as each has to find its rows in one piece, but never in two steps
        running if that leaves others out.
        """
        ready = [(s, draft) for s, draft in zip(decoding, drafts, strict=True) if self._make_room(s)]
        prompts = [sequence for sequence in self.running if num_missing(sequence) > 1]
        if self._enable_chunked_prefill or self._left_out:
            turns = self._allot_decoding(ready, self._row_budget)
            turns += self._allot_prompts(prompts, self._row_budget - sum(turn.num_rows for turn in turns))
            self._left_out = False
            return turns
        turns = self._allot_prompts(prompts, self._row_budget)
        num_prompts = len(turns)
        turns += self._allot_decoding(ready, self._row_budget - sum(turn.num_rows for turn in turns))
        self._left_out = len(turns) - num_prompts < len(ready)
        return turns

    def _allot_decoding(self, ready: list[tuple[Sequence, Draft]], rows_left: int) -> list[Turn]:
        ready = ready[:rows_left]
        rows_left -= len(ready)
        turns = []
        for sequence, draft in ready:
            draft = self._fit(sequence, draft, rows_left) if len(draft) else draft
            rows_left -= len(draft)
            turns.append(Turn(sequence, 1, draft, yields_token=True))
        return turns

    def _allot_prompts(self, prompts: list[Sequence], rows_left: int) -> list[Turn]:
        turns = []
        for sequence in prompts:
            missing = num_missing(sequence)
            num_rows = min(missing, rows_left)
            if sequence.num_prompt_logprobs_missing and self._enable_chunked_prefill:
                num_rows = min(num_rows, MAX_LOGPROB_ROWS)
            whole = num_rows == missing
            # A preempted sequence can be longer than any step: it comes back in pieces even where prompts may not.
            if num_rows == 0 or not (whole or self._enable_chunked_prefill or num_rows == self._row_budget):
                break
            rows_left -= num_rows
            turns.append(Turn(sequence, num_rows, _NO_DRAFT, yields_token=whole))
        return turns

    def _fit(self, sequence: Sequence, draft: Draft, rows_left: int) -> Draft:
        """The draft as far as there are rows and blocks for it, and output left to fill (the last token comes from
        the target in any case)."""
        num_known = len(sequence.token_ids)
        room_in_table = (len(sequence.block_table) + self._kv_cache.num_available_blocks) * self._kv_cache.block_size
        length = min(len(draft), rows_left, total_tokens(sequence) - num_known - 1, room_in_table - num_known)
        self._kv_cache.grow(sequence.block_table, num_known + length, sequence.num_computed_tokens)
        if length == len(draft):
            return draft
        probabilities = draft.probabilities
        return replace(
            draft,
            token_ids=draft.token_ids[:length],
            probabilities=None if probabilities is None else probabilities[:length],
        )

    def _admit(self, sequence: Sequence, block_table: list[int], num_cached_tokens: int) -> bool:
        """Let the sequence run if there is room, on top of the blocks found for it; otherwise let go of those."""
        if not self._has_room(sequence, block_table, num_cached_tokens):
            self._kv_cache.release(block_table)
            return False
        self._kv_cache.grow(block_table, len(sequence.token_ids), num_cached_tokens)
        sequence.block_table = block_table
        sequence.num_computed_tokens = num_cached_tokens
        if sequence.stats.first_scheduled_at is None:
            sequence.stats.first_scheduled_at = time.perf_counter()
            sequence.stats.num_cached_tokens = num_cached_tokens
        insort(self.running, sequence, key=_rank)
        return True

    def _has_room(self, sequence: Sequence, block_table: list[int], num_cached_tokens: int) -> bool:
        if len(self.running) >= self._max_running:
            return False
        limit = self._total_token_limit
        if limit is not None and sum(map(total_tokens, self.running)) + total_tokens(sequence) > limit:
            return False
        blocks_for = self._kv_cache.num_blocks_for
        num_copied = len(block_table) - num_cached_tokens // self._kv_cache.block_size  # shared, and to be written
        if self._guaranteed_no_evict:
            num_new = blocks_for(total_tokens(sequence)) - len(block_table) + num_copied
            num_promised = sum(blocks_for(total_tokens(other)) - len(other.block_table) for other in self.running)
        else:
            num_new = blocks_for(len(sequence.token_ids)) - len(block_table) + num_copied
            num_promised = len(self.running)  # each may need one soon: no admission that preempts at once
        return num_new + num_promised <= self._kv_cache.num_available_blocks

    def _make_room(self, sequence: Sequence) -> bool:
        """A block for the sequence's last known token, preempting those of lower rank. False if it was preempted."""
        while sequence.block_table:
            try:
                self._kv_cache.grow(sequence.block_table, len(sequence.token_ids), sequence.num_computed_tokens)
                return True
            except OutOfBlocks:
                self._preempt(self.running[-1])
        return False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._kv_cache.release(sequence.block_table)
        sequence.num_computed_tokens = 0
        self._on_preempt(sequence)
        self.add(sequence)
