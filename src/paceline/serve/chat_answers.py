"""How /v1/chat/completions spells its answers, whole and in chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from paceline.runtime.output import SequenceOutput
from paceline.serve.answers import REASONS, Answer, Event, Usage, logprob_entry
from paceline.serve.requests import Job, ServedModel


class MessageReader:
    """Tells the parts of one choice's text apart as it comes: thoughts, calls, and what is for the user."""

    def __init__(self, job: Job):
        self._splitter, self._parser = job.splitter(), job.parser()

    def read(self, output: SequenceOutput, used: Usage) -> Iterator[tuple[str, Any]]:
        """Parts that this output adds: ("content" | "reasoning_content", text) or ("tool_calls", a delta of a call)."""
        over = output.finish_reason is not None
        for piece in output.pieces:
            thinking = self._splitter.in_thought
            delta = self._splitter.feed(piece)
            used.num_reasoning_tokens += thinking
            yield from self._parts(delta.reasoning, delta.content)
        if over:
            delta = self._splitter.finish()
            yield from self._parts(delta.reasoning, delta.content)
            if self._parser:
                yield from _calls(self._parser.finish())

    def _parts(self, reasoning: str, content: str) -> Iterator[tuple[str, Any]]:
        if reasoning:
            yield "reasoning_content", reasoning
        if content:
            yield from _calls(self._parser.feed(content)) if self._parser else [("content", content)]


class ChatAnswer(Answer):
    kind = "chat.completion"

    def __init__(self, job: Job, model: ServedModel):
        super().__init__(job, model)
        self._readers = [MessageReader(job) for _ in self._choices]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**super()._chunk(choices), "object": f"{self.kind}.chunk"}

    def body(self) -> dict[str, Any]:
        return super().body() | self._prompt_fields()

    def _empty(self, index: int) -> dict[str, Any]:
        logprobs = {"content": [], "refusal": None} if self._shows_logprobs() else None
        message = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": None}

    def add(self, output: SequenceOutput) -> list[Event]:
        first = not any(self._rounds)
        [(name, chunk)] = super().add(output)
        return [(name, chunk | (self._prompt_fields() if first else {}))]

    def _prompt_fields(self) -> dict[str, Any]:
        """What an answer says of its prompt, once."""
        [request] = self._job.requests
        fields: dict[str, Any] = {}
        if self._job.token_ids:
            fields["prompt_token_ids"] = list(request.prompt_token_ids)
        if self._job.prompt_logprobs_wanted:
            fields["prompt_logprobs"] = self._prompt_logprobs_of(request.request_id)
        return fields

    def _extend(self, index: int, output: SequenceOutput) -> dict[str, Any]:
        choice = self._choices[index]
        message, delta = choice["message"], {}
        if self._rounds[index] == 0:
            echo = "".join(self._job.prompts)
            message["content"] = echo
            delta |= {"role": "assistant", "content": echo}
        for key, value in self._readers[index].read(output, self.used):
            if key == "tool_calls":
                self._add_call(message, delta, value)
            elif key == "content" or self._job.include_reasoning:
                message[key] = message.get(key, "") + value
                delta[key] = delta.get(key, "") + value
        logprobs = None
        if choice["logprobs"] is not None:
            entries = [logprob_entry(entry, self._token, self._decoded) for entry in output.logprobs or []]
            logprobs = {"content": entries, "refusal": None}
            choice["logprobs"]["content"] += logprobs["content"]
        if output.finish_reason is not None:
            reason = REASONS[output.finish_reason]
            called = next((name for name in ("tool_calls", "function_call") if name in message), reason)
            choice["finish_reason"] = called if reason == "stop" else reason
        return {"delta": delta, "logprobs": logprobs, "finish_reason": choice["finish_reason"]}

    def _add_call(self, message: dict[str, Any], delta: dict[str, Any], call: dict[str, Any]) -> None:
        if not self._job.legacy_functions:
            for target in (message, delta):
                _extend_calls(target.setdefault("tool_calls", []), call)
        elif call["index"] == 0:  # the older form has one call
            for target in (message, delta):
                function = target.setdefault("function_call", {})
                function.update({"name": call["function"]["name"]} if "name" in call["function"] else {})
                function["arguments"] = function.get("arguments", "") + call["function"]["arguments"]

    def _finished(self, choice: dict[str, Any]) -> dict[str, Any]:
        message = choice["message"]
        calls = message.get("tool_calls")
        if (calls or "function_call" in message) and not message["content"].strip():
            message = message | {"content": None}
        if calls:
            message = message | {"tool_calls": [{k: v for k, v in call.items() if k != "index"} for call in calls]}
        return choice | {"message": message}


def _calls(deltas: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """The parser's deltas: text as content, pieces of calls as OpenAI spells them in a stream."""
    for delta in deltas:
        if delta.content:
            yield "content", delta.content
        if delta.index is not None:
            call: dict[str, Any] = {"index": delta.index, "function": {"arguments": delta.arguments}}
            if delta.call_id is not None:
                call |= {"id": delta.call_id, "type": "function"}
                call["function"]["name"] = delta.name
            yield "tool_calls", call


def _extend_calls(calls: list[dict[str, Any]], delta: dict[str, Any]) -> None:
    for call in calls:
        if call["index"] == delta["index"]:
            call["function"]["arguments"] += delta["function"]["arguments"]
            return
    calls.append({**delta, "function": dict(delta["function"])})
