"""From the engine's outputs to the bodies of answers, whole or in chunks.

Knows how OpenAI spells them and our additions (`usage.speculation`, `token_details`); knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from paceline.runtime.output import SequenceOutput, TokenLogprobs
from paceline.runtime.sequence import FinishReason, SequenceStats
from paceline.serve.requests import Job, ServedModel

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CANCELLED: "stop"}


class Answer:
    """What has come so far of all choices of a job. `add` takes an output and returns what is new of its choice, as the
    delta of a chunk; `body` is the whole."""

    kind = ""

    def __init__(self, job: Job, model: ServedModel, token_details: bool):
        self._job, self._model = job, model
        self._token_details = token_details
        self._first_choice = {}
        total = 0
        for request in job.requests:
            self._first_choice[request.request_id] = total
            total += request.sampling.n
        self._choices: list[dict[str, Any]] = [self._empty(index) for index in range(total)]
        self._rounds = [0] * total
        self._stats: dict[int, SequenceStats] = {}
        self._num_tokens = 0
        self.head = {
            "id": job.requests[0].request_id.removesuffix("-0"),
            "object": self.kind,
            "created": int(time.time()),
            "model": model.name,
        }

    def add(self, output: SequenceOutput) -> dict[str, Any]:
        """The chunk for this output: it may have an empty delta."""
        index = self._first_choice[output.request_id] + output.index
        self._stats[index] = output.stats
        self._num_tokens += len(output.token_ids)
        choice = {"index": index} | self._extend(index, output)
        if self._token_details:
            choice["token_details"] = self._details(index, output)
        self._rounds[index] += 1
        return self.chunk([choice])

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head, "object": f"{self.kind}.chunk" if "chat" in self.kind else self.kind, "choices": choices}

    def body(self) -> dict[str, Any]:
        return {**self.head, "choices": [self._finished(choice) for choice in self._choices], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(request.prompt_token_ids) for request in self._job.requests)
        cached = max((stats.num_cached_tokens for stats in self._stats.values()), default=0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": prompt + self._num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
            "speculation": speculation_report(self._stats.values(), self._num_tokens, self._method()),
        }

    def _method(self) -> str | None:
        speculation = self._job.requests[0].speculation
        return (speculation.method or self._model.method) if speculation.enabled else None

    def _details(self, index: int, output: SequenceOutput) -> list[dict[str, Any]]:
        logprobs = output.logprobs or []
        return [
            {"text": text, "origin": origin, "logprob": entry.logprob, "round": self._rounds[index]}
            for text, origin, entry in zip(output.pieces, output.origins, logprobs, strict=False)
        ]

    def _token(self, token_id: int) -> str:
        return self._model.tokenizer.decode([token_id], skip_special_tokens=False)

    def _empty(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    def _extend(self, index: int, output: SequenceOutput) -> dict[str, Any]:
        """Add to the whole choice; returns what a chunk says of it."""
        raise NotImplementedError

    def _finished(self, choice: dict[str, Any]) -> dict[str, Any]:
        return choice


class CompletionAnswer(Answer):
    kind = "text_completion"

    def _empty(self, index: int) -> dict[str, Any]:
        echo = self._job.prompts[index // self._job.requests[0].sampling.n] if self._job.prompts else ""
        logprobs = None
        if self._job.requests[0].sampling.logprobs is not None and not self._token_details:
            logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        return {"index": index, "text": echo, "logprobs": logprobs, "finish_reason": None, "_echo": echo}

    def _extend(self, index: int, output: SequenceOutput) -> dict[str, Any]:
        choice = self._choices[index]
        text, logprobs = output.text, None
        if choice["logprobs"] is not None:
            logprobs = self._logprobs(output, len(choice["text"]))
            for name, values in logprobs.items():
                choice["logprobs"][name] += values
        choice["text"] += text
        choice["finish_reason"] = _REASONS.get(output.finish_reason)
        echo = choice.pop("_echo", "")
        return {"text": echo + text, "logprobs": logprobs, "finish_reason": choice["finish_reason"]}

    def _logprobs(self, output: SequenceOutput, offset: int) -> dict[str, list[Any]]:
        entries = output.logprobs or []
        offsets = []
        for piece in output.pieces[: len(entries)]:
            offsets.append(offset)
            offset += len(piece)
        return {
            "tokens": [self._token(entry.token_id) for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {self._token(i): p for i, p in [*entry.top, (entry.token_id, entry.logprob)]} for entry in entries
            ],
            "text_offset": offsets,
        }

    def _finished(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in choice.items() if key != "_echo"}


class ChatAnswer(Answer):
    kind = "chat.completion"

    def __init__(self, job: Job, model: ServedModel, token_details: bool):
        super().__init__(job, model, token_details)
        self._splitters = [job.splitter() for _ in self._choices]
        self._parsers = [job.parser() for _ in self._choices]

    def _empty(self, index: int) -> dict[str, Any]:
        sampling = self._job.requests[0].sampling
        wanted = sampling.logprobs is not None and not self._token_details
        logprobs = {"content": [], "refusal": None} if wanted else None
        message = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": None}

    def _extend(self, index: int, output: SequenceOutput) -> dict[str, Any]:
        choice = self._choices[index]
        message, delta = choice["message"], {}
        if self._rounds[index] == 0:
            delta |= {"role": "assistant", "content": ""}
        for key, value in self._read(index, output):
            if key == "tool_calls":
                _add_call(message.setdefault("tool_calls", []), value)
                delta.setdefault("tool_calls", []).append(value)
            else:
                message[key] = message.get(key, "") + value
                delta[key] = delta.get(key, "") + value
        logprobs = None
        if choice["logprobs"] is not None:
            logprobs = {"content": [self._logprob(entry) for entry in output.logprobs or []], "refusal": None}
            choice["logprobs"]["content"] += logprobs["content"]
        if output.finish_reason is not None:
            reason = _REASONS[output.finish_reason]
            choice["finish_reason"] = "tool_calls" if message.get("tool_calls") and reason == "stop" else reason
        return {"delta": delta, "logprobs": logprobs, "finish_reason": choice["finish_reason"]}

    def _read(self, index: int, output: SequenceOutput) -> Iterator[tuple[str, Any]]:
        """Parts of the message that this output adds: ("content" | "reasoning_content" | "tool_calls", what)."""
        splitter, parser = self._splitters[index], self._parsers[index]
        pieces = [splitter.feed(output.text)] + ([splitter.finish()] if output.finish_reason is not None else [])
        for piece in pieces:
            if piece.reasoning:
                yield "reasoning_content", piece.reasoning
            yield from _read_calls(parser.feed(piece.content)) if parser else [("content", piece.content)]
        if parser and output.finish_reason is not None:
            yield from _read_calls(parser.finish())

    def _logprob(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._token_logprob(token_id, logprob) for token_id, logprob in entry.top]
        return self._token_logprob(entry.token_id, entry.logprob) | {"top_logprobs": top}

    def _token_logprob(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._token(token_id)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}

    def _finished(self, choice: dict[str, Any]) -> dict[str, Any]:
        message = choice["message"]
        if message.get("tool_calls") and not message["content"].strip():
            message = message | {"content": None}
        calls = message.get("tool_calls")
        if calls:
            message = message | {"tool_calls": [{k: v for k, v in call.items() if k != "index"} for call in calls]}
        return choice | {"message": message}


def _read_calls(deltas: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for delta in deltas:
        if delta.content:
            yield "content", delta.content
        if delta.index is not None:
            call: dict[str, Any] = {"index": delta.index, "function": {"arguments": delta.arguments}}
            if delta.call_id is not None:
                call |= {"id": delta.call_id, "type": "function"}
                call["function"]["name"] = delta.name
            yield "tool_calls", call


def _add_call(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    if delta["index"] == len(calls):
        calls.append({**delta, "function": dict(delta["function"])})
    else:
        calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]


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
