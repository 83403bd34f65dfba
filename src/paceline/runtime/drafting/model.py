"""Drafting with a smaller model of the same vocabulary.

Knows a backend, its KV cache and how the target will draw, so that it draws alike. Whatever it cannot do (cache full,
context too long, a token it has no embedding for) it answers with a shorter or empty draft: speculation never fails a
request.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.runtime.backend import Backend, StepBatch
from paceline.runtime.drafting.drafter import Draft
from paceline.runtime.kv_cache import KVCache, OutOfBlocks
from paceline.runtime.sampling import SamplingKernels, sample_index, shape_logits

if TYPE_CHECKING:
    from paceline.runtime.sequence import Sequence
    from paceline.runtime.verify import Verdict


@dataclass
class _Cached:
    """What the draft's KV cache holds for one sequence: K and V of the first `num_computed_tokens` of the tokens known
    at the last proposal (`num_known_tokens` of them) followed by what was drafted then."""

    block_table: list[int]
    num_computed_tokens: int
    num_known_tokens: int
    draft_token_ids: list[int] = field(default_factory=list)


@dataclass
class _Drafting:
    """A sequence being drafted for: `token_ids` not yet computed, `limit` tokens wanted."""

    index: int  # of the sequence in propose()'s arguments
    sequence: Sequence
    cached: _Cached
    limit: int
    pending: list[int]
    probabilities: list[torch.Tensor] = field(default_factory=list)


class ModelDrafter:
    """Drafts for all sequences together: one forward pass per draft position once their contexts have caught up.

    The draft's K and V are kept; rejected ones are truncated, so nothing it drafted and the target accepted is computed
    again. Draft tokens are drawn as the target will draw them: argmax, Gumbel-max with the same noise (coupled), or
    sampled from q, which is then reported. Only ids below `target_vocab_size` are drafted. No sequence grows past
    `max_seq_len` tokens here. `generator` is the randomness of requests without a seed.
    """

    def __init__(
        self,
        backend: Backend,
        kernels: SamplingKernels,
        kv_cache: KVCache,
        max_seq_len: int,
        target_vocab_size: int,
        generator: np.random.Generator,
        eos_token_ids: Collection[int],
    ):
        self._backend = backend
        self._kernels = kernels
        self._kv_cache = kv_cache
        self._max_seq_len = max_seq_len
        self._vocab_size = min(target_vocab_size, backend.vocab_size)
        self._generator = generator
        self._eos_token_ids = frozenset(eos_token_ids)
        self._cached: dict[str, _Cached] = {}  # by sequence_id

    def propose(self, sequences: SequenceOf[Sequence], limits: SequenceOf[int]) -> list[Draft]:
        """As the protocol says. Draft tokens end early at a token that would end the sequence."""
        jobs = [self._prepare(i, sequence, limits[i]) for i, sequence in enumerate(sequences)]
        jobs = [job for job in jobs if job is not None]
        drafts = [Draft() for _ in sequences]
        active = jobs
        while active:
            active = [job for job in active if self._make_room(job)]
            if not active:
                break
            for job, token_id in zip(active, self._choose(active, self._forward(active)), strict=True):
                job.cached.draft_token_ids.append(token_id)
                job.pending = [token_id]
            active = [job for job in active if not self._complete(job)]
        for job in jobs:
            cached = job.cached
            num_known_computed = min(cached.num_computed_tokens, cached.num_known_tokens)
            salt = job.sequence.request.cache_salt
            self._kv_cache.publish(cached.block_table, job.sequence.token_ids, num_known_computed, salt)
            if cached.draft_token_ids:
                probabilities = torch.stack(job.probabilities) if job.probabilities else None
                drafts[job.index] = Draft(list(cached.draft_token_ids), probabilities, "draft")
        return drafts

    def observe(self, sequence: Sequence, draft: Draft, verdict: Verdict) -> None:
        """Nothing to do: the next proposal compares what was drafted with what the sequence has become."""

    def release(self, sequence: Sequence) -> None:
        cached = self._cached.pop(sequence.sequence_id, None)
        if cached is not None:
            self._kv_cache.release(cached.block_table)

    def _prepare(self, index: int, sequence: Sequence, limit: int) -> _Drafting | None:
        """Drop the K and V of rejected tokens and see what has to be computed; None if nothing can be drafted."""
        token_ids = sequence.token_ids
        limit = min(limit, self._max_seq_len - len(token_ids))
        if limit <= 0:
            return None
        cached = self._cached.get(sequence.sequence_id)
        if cached is None:
            prefix = self._kv_cache.match_prefix(token_ids, sequence.request.cache_salt)
            cached = _Cached(*prefix, num_known_tokens=len(token_ids))
            self._cached[sequence.sequence_id] = cached
        num_valid = cached.num_known_tokens
        for token_id in cached.draft_token_ids:
            if num_valid >= len(token_ids) or token_ids[num_valid] != token_id:
                break
            num_valid += 1
        num_valid = min(num_valid, len(token_ids) - 1)  # the last known token's logits are needed in any case
        if cached.num_computed_tokens > num_valid:
            cached.num_computed_tokens = num_valid
            self._kv_cache.truncate(cached.block_table, num_valid)
        cached.num_known_tokens, cached.draft_token_ids = len(token_ids), []
        pending = token_ids[cached.num_computed_tokens :]
        if max(pending) >= self._backend.vocab_size:
            return None
        return _Drafting(index, sequence, cached, limit, pending)

    def _make_room(self, job: _Drafting) -> bool:
        cached = job.cached
        num_tokens = cached.num_computed_tokens + len(job.pending)
        try:
            self._kv_cache.grow(cached.block_table, num_tokens, cached.num_computed_tokens)
        except OutOfBlocks:
            return False
        return True

    def _forward(self, jobs: list[_Drafting]) -> torch.Tensor:
        """Compute the pending tokens of all jobs, max_rows at a time: logits [jobs, vocab] after the last of each."""
        logits: list[torch.Tensor] = []
        chunk: list[tuple[_Drafting, int]] = []  # a job and how many of its pending tokens this pass takes
        room = self._backend.max_rows
        for job in jobs:
            num_left = len(job.pending)
            while num_left:
                num_rows = min(num_left, room)
                chunk.append((job, num_rows))
                num_left -= num_rows
                room -= num_rows
                if room == 0:
                    logits.append(self._forward_chunk(chunk).clone())  # the next pass overwrites it
                    chunk, room = [], self._backend.max_rows
        if chunk:
            logits.append(self._forward_chunk(chunk))
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _forward_chunk(self, chunk: list[tuple[_Drafting, int]]) -> torch.Tensor:
        """One forward pass; advances its jobs. Logits of the jobs whose pending tokens end with it."""
        token_ids: list[int] = []
        positions: list[int] = []
        sequence_of_row: list[int] = []
        logit_rows: list[int] = []
        block_tables = np.zeros((len(chunk), max(len(job.cached.block_table) for job, _ in chunk)), dtype=np.int32)
        for row, (job, num_rows) in enumerate(chunk):
            cached = job.cached
            token_ids += job.pending[:num_rows]
            positions += range(cached.num_computed_tokens, cached.num_computed_tokens + num_rows)
            sequence_of_row += [row] * num_rows
            block_tables[row, : len(cached.block_table)] = cached.block_table
            cached.num_computed_tokens += num_rows
            job.pending = job.pending[num_rows:]
            if not job.pending:
                logit_rows.append(len(token_ids) - 1)
        arrays = (np.array(values, dtype=np.int32) for values in (token_ids, positions, sequence_of_row))
        logits = self._backend.forward(StepBatch(*arrays, block_tables, np.array(logit_rows, dtype=np.int32)))
        return logits[:, : self._vocab_size]

    def _choose(self, jobs: list[_Drafting], logits: torch.Tensor) -> list[int]:
        """The next draft token of each job, drawn as the target will draw it."""
        chosen: dict[int, int] = {}
        plain_greedy: list[int] = []
        for row, job in enumerate(jobs):
            sampling, drafted = job.sequence.sampling, job.cached.draft_token_ids
            raw = logits[row : row + 1]
            shaped = shape_logits(raw, job.sequence, drafted, self._eos_token_ids)
            if sampling.mode == "coupled":
                position = job.sequence.num_output_tokens + len(drafted)
                [chosen[row]] = self._kernels.gumbel_argmax(shaped, sampling.seed, [position])
            elif sampling.mode == "rejection":
                probabilities = torch.softmax(shaped, dim=1)[0]
                job.probabilities.append(probabilities)
                chosen[row] = sample_index(probabilities, self._generator.random())
            elif shaped is raw:
                plain_greedy.append(row)
            else:
                [chosen[row]] = self._kernels.argmax(shaped)
        if plain_greedy:
            rows = logits if len(plain_greedy) == len(jobs) else logits[plain_greedy]
            chosen.update(zip(plain_greedy, self._kernels.argmax(rows), strict=True))
        return [chosen[row] for row in range(len(jobs))]

    def _complete(self, job: _Drafting) -> bool:
        """Whether to stop drafting: enough tokens, or one that ends the sequence if accepted."""
        sampling, drafted = job.sequence.sampling, job.cached.draft_token_ids
        is_eos = drafted[-1] in self._eos_token_ids and not sampling.ignore_eos
        return is_eos or drafted[-1] in sampling.stop_token_ids or len(drafted) >= job.limit
