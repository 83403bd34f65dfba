"""The engine: requests in, tokens out. One step is schedule, draft, forward, verify, commit.

Knows the order of things and no arithmetic: what runs is the scheduler's choice, how much to draft the controller's,
what is accepted the verifier's, what a client sees the output stream's. Synchronous, owned by one thread.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf

import tokenizers
import torch

from paceline.errors import RequestError
from paceline.runtime.backend import Backend
from paceline.runtime.controller import Controller
from paceline.runtime.drafting.drafter import Draft, Drafter
from paceline.runtime.drafting.grammar import forced_draft, permitted_draft
from paceline.runtime.drafting.prediction import predicted_draft
from paceline.runtime.grammar import Grammars
from paceline.runtime.kv_cache import KVCache
from paceline.runtime.limits import Admission, EngineLimits
from paceline.runtime.logprobs import TokenLogprobs, token_logprobs
from paceline.runtime.metrics import Metrics
from paceline.runtime.output import OutputStream, SequenceOutput, joined
from paceline.runtime.rows import lay_out
from paceline.runtime.scheduler import Scheduler, Turn
from paceline.runtime.sequence import Request, Sequence
from paceline.runtime.verify import Verdict, Verifier

__all__ = ["Engine", "EngineLimits", "SequenceOutput", "TokenLogprobs"]

_NO_DRAFT = Draft()


class Engine:
    """Runs any number of requests together.

    `drafters` are the speculation methods at hand, by name; `default_method` is that of requests that name none (None:
    they run without). Whatever the drafters do, greedy and seeded output is that of plain decoding.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: tokenizers.Tokenizer,
        limits: EngineLimits,
        drafters: Mapping[str, Drafter],
        default_method: str | None,
        controller: Controller,
        verifier: Verifier,
        eos_token_ids: Collection[int],
        metrics: Metrics | None = None,
    ):
        self.metrics = metrics or Metrics()
        self._backend = backend
        self._tokenizer = tokenizer
        self._drafters = dict(drafters)
        self._default_method = default_method
        self._controller = controller
        self._verifier = verifier
        self._eos_token_ids = frozenset(eos_token_ids)
        row_budget = min(limits.max_num_tokens, backend.max_rows)
        self._admission = Admission(
            limits, backend.vocab_size, backend.num_blocks * backend.block_size, row_budget, frozenset(drafters)
        )
        self._kv_cache = KVCache(
            backend.num_blocks, backend.block_size, backend.copy_block, limits.enable_prefix_cache
        )
        self._scheduler = Scheduler(
            self._kv_cache,
            row_budget=row_budget,
            max_batch_size=limits.max_batch_size,
            total_token_limit=limits.total_token_limit,
            enable_chunked_prefill=limits.enable_chunked_prefill,
            guaranteed_no_evict=limits.scheduler_policy == "guaranteed_no_evict",
            on_preempt=self._preempted,
        )
        self.grammars = Grammars(tokenizer, backend.vocab_size, self._eos_token_ids)
        self._streams: dict[str, dict[Sequence, OutputStream]] = {}  # by request id: its unfinished choices
        self._siblings: dict[str, list[Sequence]] = {}  # by request id: choices that wait for the first one's prompt

    @property
    def has_unfinished(self) -> bool:
        return bool(self._streams)

    def is_unfinished(self, request_id: str) -> bool:
        """Whether any choice of a submitted request has not finished."""
        return request_id in self._streams

    @property
    def num_running(self) -> int:
        """Sequences that take part in steps."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that are queued, those that wait for their request's first choice included."""
        return len(self._scheduler.waiting) + sum(map(len, self._siblings.values()))

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError or CapacityError, having changed nothing, if it can never be served."""
        if request.request_id in self._streams:
            raise RequestError(
                f"`request_id` {request.request_id!r} is that of an unfinished request.",
                "give every request its own id",
                field="request_id",
            )
        request = self._admission.resolve(request)
        first, *others = [Sequence(request, index) for index in range(request.sampling.n)]
        if request.sampling.grammar is not None:
            for sequence in (first, *others):
                sequence.grammar = self.grammars.matcher(request.sampling.grammar)
        self._streams[request.request_id] = {
            sequence: OutputStream(sequence, self._tokenizer, self._eos_token_ids) for sequence in (first, *others)
        }
        if others:
            self._siblings[request.request_id] = others
        self._scheduler.add(first)
        self._update_gauges()

    def cancel(self, request_id: str) -> list[SequenceOutput]:
        """End a request now: the last output of each unfinished choice. Nothing happens if it is over already."""
        self._siblings.pop(request_id, None)
        outputs = []
        for sequence, stream in list(self._streams.get(request_id, {}).items()):
            outputs.append(stream.cancel())
            self._finish(sequence)
        self._update_gauges()
        return outputs

    def step(self) -> list[SequenceOutput]:
        """One forward pass of the target: what is new of every sequence that got tokens."""
        enter = self.metrics.enter
        enter("schedule")
        decoding, draft_rows = self._scheduler.schedule()
        enter("draft")
        drafts = self._draft(decoding, draft_rows)
        enter("schedule")
        turns = self._scheduler.allot(decoding, drafts)
        if not turns:
            enter(None)
            return []
        batch, offsets = lay_out(turns)
        enter("forward")
        logits = self._backend.forward(batch)
        enter("verify")
        # The rows that judge a draft are the last of its sequence's.
        judged = [(t, o + t.num_logit_rows - len(t.draft) - 1) for t, o in zip(turns, offsets, strict=True)
                  if t.yields_token]  # fmt: skip
        verdicts = self._verifier.verify_batch(
            [turn.sequence for turn, _ in judged], [turn.draft for turn, _ in judged], logits, [o for _, o in judged]
        )
        enter("commit")
        self._note_prompt_logprobs(turns, logits, offsets)
        outputs = self._commit(turns, verdicts, logits, [offset for _, offset in judged])
        self.metrics.iteration_tokens_total.observe(len(batch.token_ids))
        self._update_gauges()
        enter(None)
        return outputs

    def generate(self, requests: Iterable[Request]) -> list[SequenceOutput]:
        """Run requests to their end: one whole output per choice, in order. For callers that own the engine alone:
        outputs of other requests would be lost. If it is interrupted or refused a request, all are cancelled."""
        parts: dict[tuple[str, int], list[SequenceOutput]] = {}
        try:
            for request in requests:
                self.submit(request)
                parts.update({(request.request_id, index): [] for index in range(request.sampling.n)})
            while self.has_unfinished:
                for output in self.step():
                    parts[output.request_id, output.index].append(output)
        finally:
            for request_id, _ in parts:
                self.cancel(request_id)
        return [joined(outputs) for outputs in parts.values()]

    def check(self) -> None:
        """AssertionError if a KV cache block is lost or miscounted. May be called between any two steps."""
        self._kv_cache.check(sequence.block_table for sequence in self._scheduler.running)

    def _draft(self, decoding: SequenceOf[Sequence], draft_rows: int) -> list[Draft]:
        """A draft, mostly empty ones, for each of `decoding`; none before the first token of a sequence.

        Tokens that a grammar forces are a draft too, as long as there are rows for them: certain to be accepted, they
        are bound by no `num_draft_tokens`, unless a request sets that to 0."""
        drafts = [_NO_DRAFT] * len(decoding)
        speculating = [i for i, s in enumerate(decoding) if s.num_output_tokens > 0 and self._speculates(s)]
        if not speculating or draft_rows <= 0:
            return drafts
        limits = self._controller.limits([decoding[i] for i in speculating], draft_rows)
        share = draft_rows // len(speculating)
        by_method: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for index, limit in zip(speculating, limits, strict=True):
            sequence = decoding[index]
            room = sequence.sampling.max_tokens - sequence.num_output_tokens - 1
            limit = min(limit, room)
            drafts[index] = forced_draft(sequence, min(max(limit, share), room))
            predicted = predicted_draft(sequence, limit)
            if len(predicted) > len(drafts[index]):
                drafts[index] = predicted
                continue
            method = self._method(sequence)
            if method is not None and limit > len(drafts[index]):
                by_method[method].append((index, limit))
        for method, members in by_method.items():
            sequences, limits = [decoding[index] for index, _ in members], [limit for _, limit in members]
            for (index, _), draft in zip(members, self._drafters[method].propose(sequences, limits), strict=True):
                draft = permitted_draft(decoding[index], draft)
                if draft.probabilities is not None or len(draft) >= len(drafts[index]):
                    drafts[index] = draft
        return drafts

    def _note_prompt_logprobs(self, turns: SequenceOf[Turn], logits: torch.Tensor, offsets: SequenceOf[int]) -> None:
        """Keep the log-probabilities of the prompts' tokens that follow the rows of this step."""
        for turn, offset in zip(turns, offsets, strict=True):
            sequence = turn.sequence
            if not sequence.num_prompt_logprobs_missing:
                continue
            first = len(sequence.prompt_logprobs)  # the position whose log-probability is next
            end = min(sequence.num_computed_tokens + turn.num_known + 1, sequence.num_prompt_tokens)
            if end <= first:  # a preempted sequence computes its beginning again
                continue
            rows = logits[offset : offset + end - first]
            token_ids = sequence.token_ids[first:end]
            sequence.prompt_logprobs += token_logprobs(rows, token_ids, sequence.sampling.prompt_logprobs)

    def _commit(
        self, turns: SequenceOf[Turn], verdicts: Iterable[Verdict], logits: torch.Tensor, offsets: Iterable[int]
    ) -> list[SequenceOutput]:
        """Enter into the sequences what the step computed and what was accepted."""
        outputs = []
        judgements = iter(zip(verdicts, offsets, strict=True))
        for turn in turns:
            sequence = turn.sequence
            sequence.num_computed_tokens += turn.num_known
            if turn.yields_token:
                verdict, offset = next(judgements)
                outputs.append(self._accept(turn, verdict, logits[offset : offset + len(verdict.token_ids)]))
            else:
                self._publish(sequence)
        return outputs

    def _accept(self, turn: Turn, verdict: Verdict, logits: torch.Tensor) -> SequenceOutput:
        """Append a verdict's tokens, roll the KV cache back to what was accepted, and end the sequence if it is over.
        `logits` has one row per token."""
        sequence, draft = turn.sequence, turn.draft
        is_first, num_before = sequence.num_output_tokens == 0, len(sequence.token_ids)
        num_top = sequence.sampling.logprobs
        logprobs = None if num_top is None else token_logprobs(logits, verdict.token_ids, num_top)
        origins = [draft.source] * verdict.num_accepted + ["target"]
        output = self._stream(sequence).extend(verdict.token_ids, origins, logprobs)
        output.prompt_logprobs = sequence.prompt_logprobs if is_first else None
        if sequence.prediction is not None:
            sequence.prediction.advance(output.token_ids)
            sequence.stats.num_matched_tokens = sequence.prediction.num_matched

        sequence.num_computed_tokens = min(num_before + verdict.num_accepted, len(sequence.token_ids))
        self._publish(sequence)
        self._kv_cache.truncate(sequence.block_table, sequence.num_computed_tokens)
        self.metrics.record_tokens(sequence, len(output.token_ids), time.perf_counter())
        if len(draft):
            self.metrics.record_draft(sequence, len(draft), min(verdict.num_accepted, len(output.token_ids)))
            method = self._method(sequence)
            if method is not None:
                self._drafters[method].observe(sequence, draft, verdict)
        if is_first and sequence.index == 0:
            for sibling in self._siblings.pop(sequence.request.request_id, []):
                self._scheduler.add_fork(sequence, sibling)
        if sequence.finished:
            self._finish(sequence)
        return output

    def _finish(self, sequence: Sequence) -> None:
        """The sequence is over, for whatever reason: let go of all that is kept for it."""
        request_id = sequence.request.request_id
        self._scheduler.remove(sequence)
        method = self._method(sequence)
        if method is not None:
            self._drafters[method].release(sequence)
        self.metrics.record_finished(sequence, time.perf_counter())
        del self._streams[request_id][sequence]
        if not self._streams[request_id]:
            del self._streams[request_id]

    def _preempted(self, sequence: Sequence) -> None:
        self.metrics.num_preemptions += 1
        method = self._method(sequence)
        if method is not None:
            self._drafters[method].release(sequence)

    def _publish(self, sequence: Sequence) -> None:
        salt = sequence.request.cache_salt
        self._kv_cache.publish(sequence.block_table, sequence.token_ids, sequence.num_computed_tokens, salt)

    def _update_gauges(self) -> None:
        metrics, cache = self.metrics, self._kv_cache
        metrics.num_requests_running = self.num_running
        metrics.num_requests_waiting = self.num_waiting
        metrics.kv_cache_usage_perc = 1.0 - cache.num_available_blocks / cache.num_blocks

    def _speculates(self, sequence: Sequence) -> bool:
        speculation = sequence.request.speculation
        if not speculation.enabled or speculation.num_draft_tokens == 0:
            return False
        has_own_source = sequence.grammar is not None or sequence.prediction is not None
        return has_own_source or self._method(sequence) is not None

    def _method(self, sequence: Sequence) -> str | None:
        """The speculation method of a sequence, None if it runs without."""
        speculation = sequence.request.speculation
        return (speculation.method or self._default_method) if speculation.enabled else None

    def _stream(self, sequence: Sequence) -> OutputStream:
        return self._streams[sequence.request.request_id][sequence]
