"""How /v1/responses spells its answers: output items, and the events that build them up in a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from paceline.errors import PacelineError
from paceline.runtime.output import SequenceOutput
from paceline.runtime.sequence import FinishReason
from paceline.serve.answers import Answer, Event, logprob_entry
from paceline.serve.chat_answers import MessageReader
from paceline.serve.requests import Job, ServedModel, new_id
from paceline.serve.response_types import ResponseRequest


class ResponseAnswer(Answer):
    """One response. Its items are open one at a time: a part of another kind closes the last and opens the next."""

    ends_with_done = False

    def __init__(self, job: Job, model: ServedModel, body: ResponseRequest):
        super().__init__(job, model)
        self._reader = MessageReader(job)
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item is
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text has not come yet
        self._num_events = 0
        self.id = self.id.replace("chatcmpl-", "resp_")
        self._response = {"id": self.id} | _head(job, model, body) | {"output": self._items}

    def begin(self) -> list[Event]:
        return [self._event("response.created", response=self._snapshot()),
                self._event("response.in_progress", response=self._snapshot())]  # fmt: skip

    def add(self, output: SequenceOutput) -> list[Event]:
        self.used.add(output)
        events: list[Event] = []
        if self._shows_logprobs():
            self._logprobs += [logprob_entry(e, self._decoded, self._decoded) for e in output.logprobs or []]
        for kind, value in self._reader.read(output, self.used):
            events += self._add_part(kind, value)
        if output.finish_reason is not None:
            complete = output.finish_reason is not FinishReason.LENGTH
            events += self._close("completed" if complete else "incomplete")
            self._response["status"] = "completed" if complete else "incomplete"
            self._response["completed_at"] = int(time.time()) if complete else None
            self._response["incomplete_details"] = None if complete else {"reason": "max_output_tokens"}
            self._response["usage"] = self._usage()
        return events

    def end(self) -> list[Event]:
        return [self._event(f"response.{self._response['status']}", response=self._snapshot())]

    def fail(self, error: PacelineError) -> list[Event]:
        code = "rate_limit_exceeded" if error.http_status == 429 else "server_error"
        self._response |= {"status": "failed", "error": {"code": code, "message": str(error)}, "usage": self._usage()}
        return [self._event("response.failed", response=self._snapshot())]

    def body(self) -> dict[str, Any]:
        return self._snapshot()

    def _snapshot(self) -> dict[str, Any]:
        return {**self._response, "output": [dict(item) for item in self._items]}

    def _event(self, kind: str, **fields: Any) -> Event:
        self._num_events += 1
        return kind, {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _item_event(self, kind: str, **fields: Any) -> Event:
        """An event about the last item."""
        where = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **where, **fields)

    def _add_part(self, kind: str, value: Any) -> Iterator[Event]:
        if kind == "tool_calls":
            self._logprobs.clear()
            yield from self._add_call(value)
            return
        wanted = "message" if kind == "content" else "reasoning"
        if kind == "reasoning_content":
            self._logprobs.clear()
            if not self._job.include_reasoning:
                return
        if not self._is_open or self._items[-1]["type"] != wanted:
            yield from self._close("completed")
            yield from self._open_text(wanted)
        part = self._items[-1]["content"][0]
        part["text"] += value
        if wanted == "reasoning":
            yield self._item_event("response.reasoning_text.delta", content_index=0, delta=value)
            return
        logprobs, self._logprobs = self._logprobs, []
        part["logprobs"] += logprobs
        yield self._item_event("response.output_text.delta", content_index=0, delta=value, logprobs=logprobs)

    def _open_text(self, kind: str) -> Iterator[Event]:
        if kind == "message":
            item = {"type": "message", "id": new_id("msg"), "role": "assistant", "status": "in_progress", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"type": "reasoning", "id": new_id("rs"), "summary": [], "status": "in_progress", "content": []}
            part = {"type": "reasoning_text", "text": ""}
        yield self._open(item)
        self._items[-1]["content"] = [part]
        yield self._item_event("response.content_part.added", content_index=0, part=dict(part))

    def _add_call(self, call: dict[str, Any]) -> Iterator[Event]:
        function = call["function"]
        if "id" in call:
            yield from self._close("completed")
            yield self._open({"type": "function_call", "id": new_id("fc"), "call_id": call["id"],
                              "name": function["name"], "arguments": "", "status": "in_progress"})  # fmt: skip
        if function["arguments"]:
            self._items[-1]["arguments"] += function["arguments"]
            yield self._item_event("response.function_call_arguments.delta", delta=function["arguments"])

    def _open(self, item: dict[str, Any]) -> Event:
        self._items.append(item)
        self._is_open = True
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item))

    def _close(self, status: str) -> Iterator[Event]:
        """End the last item, if it is open."""
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._item_event("response.function_call_arguments.done", **done)
        else:
            part = item["content"][0]
            if item["type"] == "message":
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._item_event("response.output_text.done", content_index=0, **done)
            else:
                yield self._item_event("response.reasoning_text.done", content_index=0, text=part["text"])
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=dict(item))

    def _usage(self) -> dict[str, Any]:
        accepted, rejected = self.used.prediction_tokens()
        return {
            "input_tokens": self.used.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.used.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.used.num_tokens,
            "output_tokens_details": {
                "reasoning_tokens": self.used.num_reasoning_tokens,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
            },
            "total_tokens": self.used.num_prompt_tokens + self.used.num_tokens,
            "speculation": self.used.speculation(),
        }

    def _empty(self, index: int) -> dict[str, Any]:
        return {}


def _head(job: Job, model: ServedModel, body: ResponseRequest) -> dict[str, Any]:
    """What a response says of its request."""
    sampling = job.requests[0].sampling
    tools = [tool.model_dump() for tool in body.tools or ()]
    choice = body.tool_choice
    format = body.text.format if body.text is not None and body.text.format is not None else {"type": "text"}
    reasoning = body.reasoning
    return {
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model.name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
        "service_tier": job.service_tier,
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": format},
        "tool_choice": choice.model_dump() if hasattr(choice, "model_dump") else choice or "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }
