"""What answers have in common: from the engine's outputs to bodies, whole or in chunks, with what was used.

Knows our additions (`usage.speculation`, `token_details`) and vLLM's; how an endpoint spells its choices is its own
module's (`chat_answers.py`, `completion_answers.py`, `response_answers.py`). Knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from paceline.errors import PacelineError
from paceline.runtime.logprobs import TokenLogprobs
from paceline.runtime.output import SequenceOutput
from paceline.runtime.sequence import FinishReason, SequenceStats
from paceline.serve.requests import Job, ServedModel

Event = tuple[str | None, dict[str, Any]]  # the name of a server-sent event, None if it needs none, and its data

REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "stop"}


class Usage:
    """What a job's outputs have used so far."""

    def __init__(self, job: Job, model: ServedModel):
        self._job, self._model = job, model
        self.stats: dict[tuple[str, int], SequenceStats] = {}  # by request id and choice
        self.num_tokens = 0
        self.num_reasoning_tokens = 0

    def add(self, output: SequenceOutput) -> None:
        self.stats[output.request_id, output.index] = output.stats
        self.num_tokens += 0 if self._job.prompt_only else len(output.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self._job.requests)

    @property
    def num_cached_tokens(self) -> int:
        return max((stats.num_cached_tokens for stats in self.stats.values()), default=0)

    def prediction_tokens(self) -> tuple[int, int]:
        """(accepted, rejected): tokens of the predictions that came in the outputs, and those that did not."""
        accepted = sum(stats.num_matched_tokens for stats in self.stats.values())
        predicted = sum(len(r.prediction_token_ids) * r.sampling.n for r in self._job.requests)
        return accepted, max(0, predicted - accepted)

    def speculation(self) -> dict[str, Any]:
        wanted = self._job.requests[0].speculation
        method = (wanted.method or self._model.method) if wanted.enabled else None
        return speculation_report(self.stats.values(), self.num_tokens, method)

    def body(self) -> dict[str, Any]:
        """As the completion endpoints spell it."""
        accepted, rejected = self.prediction_tokens()
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": self.num_reasoning_tokens,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
            "speculation": self.speculation(),
        }


class Answer:
    """What has come so far of all choices of a job.

    `add` takes an output and returns the events of a stream that tell what is new; `begin` and `end` are those before
    and after all outputs, `fail` those that tell of an error (none: the stream has no form of its own for it). `body`
    is the whole.
    """

    kind = ""
    ends_with_done = True  # a stream ends with the line [DONE]

    def __init__(self, job: Job, model: ServedModel):
        self._job, self._model = job, model
        self._first_choice = {}
        total = 0
        for request in job.requests:
            self._first_choice[request.request_id] = total
            total += request.sampling.n
        self._choices: list[dict[str, Any]] = [self._empty(index) for index in range(total)]
        self._rounds = [0] * total
        self._prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}  # by request id
        self.used = Usage(job, model)
        self.id = job.requests[0].request_id.removesuffix("-0")
        self.head = {
            "id": self.id,
            "object": self.kind,
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        } | ({"service_tier": job.service_tier} if job.service_tier else {})

    def begin(self) -> list[Event]:
        return []

    def add(self, output: SequenceOutput) -> list[Event]:
        """One chunk: its delta may be empty."""
        index = self._first_choice[output.request_id] + output.index
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[output.request_id] = output.prompt_logprobs
        self.used.add(output)
        choice = {"index": index} | self._extend(index, output)
        if self._job.token_ids:
            choice["token_ids"] = list(output.token_ids)
            self._choices[index].setdefault("token_ids", []).extend(output.token_ids)
        if self._job.token_details:
            choice["token_details"] = self._details(index, output)
        self._rounds[index] += 1
        chunk = self._chunk([choice])
        options = self._job.stream_options
        if options.continuous_usage_stats:
            chunk["usage"] = self.used.body()
        elif options.include_usage:
            chunk["usage"] = None
        return [(None, chunk)]

    def end(self) -> list[Event]:
        if not self._job.stream_options.include_usage:
            return []
        return [(None, self._chunk([]) | {"usage": self.used.body()})]

    def fail(self, error: PacelineError) -> list[Event]:
        return []

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head, "choices": choices}

    def body(self) -> dict[str, Any]:
        choices = [self._finished(choice) for choice in self._choices]
        return {**self.head, "choices": choices, "usage": self.used.body()}

    def _details(self, index: int, output: SequenceOutput) -> list[dict[str, Any]]:
        logprobs = output.logprobs or []
        return [
            {"text": text, "origin": origin, "logprob": entry.logprob, "round": self._rounds[index]}
            for text, origin, entry in zip(output.pieces, output.origins, logprobs, strict=False)
        ]

    def _shows_logprobs(self) -> bool:
        """Whether logprobs were asked for themselves, not only with the token details."""
        return self._job.requests[0].sampling.logprobs is not None and not self._job.token_details

    def _token(self, token_id: int) -> str:
        """A token's text as logprobs have it."""
        if self._job.tokens_as_ids:
            return f"token_id:{token_id}"
        return self._decoded(token_id)

    def _decoded(self, token_id: int) -> str:
        return self._model.tokenizer.decode([token_id], skip_special_tokens=False)

    def _prompt_logprobs_of(self, request_id: str) -> list[dict[str, Any] | None]:
        """As vLLM spells them: a mapping from token id to logprob, rank and text for each token of the prompt."""
        entries: list[dict[str, Any] | None] = []
        for entry in self._prompt_logprobs.get(request_id, []):
            if entry is None:
                entries.append(None)
                continue
            tokens = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, start=1)}
            tokens = {entry.token_id: (entry.logprob, entry.rank)} | tokens
            entries.append({
                str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": self._decoded(token_id)}
                for token_id, (logprob, rank) in tokens.items()
            })  # fmt: skip
        return entries

    def _empty(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def _extend(self, index: int, output: SequenceOutput) -> dict[str, Any]:
        """Add to the whole choice; returns what a chunk says of it."""
        raise NotImplementedError

    def _finished(self, choice: dict[str, Any]) -> dict[str, Any]:
        return choice


def logprob_entry(entry: TokenLogprobs, name: Callable[[int], str], text: Callable[[int], str]) -> dict[str, Any]:
    """A token with its likeliest alternatives, as chats have them. `name` is what to call a token, `text` its text."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": name(token_id), "logprob": logprob, "bytes": list(text(token_id).encode("utf-8", "replace"))}

    return one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*pair) for pair in entry.top]}


def speculation_report(all_stats: Iterable[SequenceStats], num_tokens: int, method: str | None) -> dict[str, Any]:
    """What speculation did for some sequences, in numbers. Times in milliseconds: those of the first sequence, None
    before it has them."""
    all_stats = list(all_stats)
    drafted = sum(stats.num_draft_tokens for stats in all_stats)
    accepted = sum(stats.num_accepted_tokens for stats in all_stats)
    rounds = sum(stats.num_rounds for stats in all_stats)
    first = all_stats[0] if all_stats else SequenceStats()
    return {
        "method": method,
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "acceptance_length": round(num_tokens / rounds, 3) if rounds else None,
        "num_rounds": rounds,
        "drafted_per_position": _summed(stats.drafted_per_position for stats in all_stats),
        "accepted_per_position": _summed(stats.accepted_per_position for stats in all_stats),
        "queue_ms": _milliseconds(first.arrived_at, first.first_scheduled_at),
        "ttft_ms": _milliseconds(first.arrived_at, first.first_token_at),
        "decode_ms": _milliseconds(first.first_token_at, first.last_token_at),
    }


def _summed(lists: Iterable[list[int]]) -> list[int]:
    total: list[int] = []
    for counts in lists:
        total += [0] * (len(counts) - len(total))
        for position, count in enumerate(counts):
            total[position] += count
    return total


def _milliseconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round((end - start) * 1e3, 3)
