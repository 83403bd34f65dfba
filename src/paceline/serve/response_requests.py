"""/v1/responses: its body as that of a chat. Everything after that is the chat's.

Knows how OpenAI's newer form spells what the older one has.
"""

from __future__ import annotations

from typing import Any

from paceline.errors import RequestError
from paceline.serve.chat_requests import chat_job
from paceline.serve.openai_types import ChatCompletionRequest
from paceline.serve.requests import Job, ServedModel
from paceline.serve.response_types import InputItem, ResponseRequest, Sampling

LOGPROBS = "message.output_text.logprobs"
# What a refusal of the chat's calls a parameter -> what it is called here.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format": "text.format",
    "response_format.type": "text.format.type",
    "response_format.json_schema": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema.strict": "text.format.strict",
    "reasoning_effort": "reasoning.effort",
}


def response_job(body: ResponseRequest, model: ServedModel) -> Job:
    """The one request of this body. Raises RequestError naming the parameter that is wrong."""
    messages = _messages(body)
    try:
        job = chat_job(_chat(body, messages), model)
        while body.truncation == "auto" and _is_too_long(job, body, model):
            shorter = _without_oldest_turn(messages)
            if shorter == messages:
                break  # the engine says what is too long
            messages = shorter
            job = chat_job(_chat(body, messages), model)
    except RequestError as error:
        if error.field in _NAMES:
            name = _NAMES[error.field]
            message = error.message.replace(f"`{error.field}`", f"`{name}`")
            raise RequestError(message, error.hint, field=name) from error
        raise
    return job


def _chat(body: ResponseRequest, messages: list[dict[str, Any]]) -> ChatCompletionRequest:
    """The chat that this body asks for."""
    same = {name: getattr(body, name) for name in Sampling.model_fields} | {
        name: getattr(body, name) for name in ("prediction", "chat_template_kwargs", "parallel_tool_calls")
    }
    logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    text, reasoning, choice = body.text, body.reasoning, body.tool_choice
    tools = [{"type": "function", "function": t.model_dump(exclude={"type"})} for t in body.tools or ()]
    given = same | {
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "tools": tools or None,
        "tool_choice": choice if choice is None or isinstance(choice, str)
        else {"type": "function", "function": {"name": choice.name}},
        "response_format": None if text is None or text.format is None else _response_format(text.format),
        "verbosity": None if text is None else text.verbosity,
        "reasoning_effort": None if reasoning is None else reasoning.effort,
        "logprobs": logprobs or None,
        "top_logprobs": (body.top_logprobs or 0) if logprobs else None,
    }  # fmt: skip
    # What was read already is passed on as it was read.
    given = {
        name: value.model_dump(exclude_none=True) if hasattr(value, "model_dump") else value
        for name, value in given.items()
    }
    return ChatCompletionRequest.model_validate(given)


def _response_format(format: dict[str, Any]) -> dict[str, Any]:
    if format.get("type") != "json_schema":
        return format
    return {"type": "json_schema", "json_schema": {key: value for key, value in format.items() if key != "type"}}


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    """The conversation: instructions first, calls with the message they belong to."""
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    thought = ""
    for item in body.input:
        if item.type == "reasoning":
            thought += _text(item.content)
        elif item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif item.type == "function_call":
            last = messages[-1] if messages else {}
            if last.get("role") != "assistant":
                last = _said("assistant", None, thought)
                messages.append(last)
            last.setdefault("tool_calls", []).append(_call(item))
            thought = ""
        else:
            messages.append(_said(item.role or "user", _text(item.content), thought))
            thought = ""
    return messages


def _said(role: str, content: str | None, thought: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": content}
    if thought and role == "assistant":
        message["reasoning_content"] = thought
    return message


def _call(item: InputItem) -> dict[str, Any]:
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


def _is_too_long(job: Job, body: ResponseRequest, model: ServedModel) -> bool:
    """Whether the prompt leaves no room for the output, or for one token of it."""
    return len(job.requests[0].prompt_token_ids) + (body.max_output_tokens or 1) > model.max_seq_len


def _without_oldest_turn(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop everything from the first user's message to the next one; never the last turn, or what stands before all."""
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    return messages if len(users) < 2 else messages[: users[0]] + messages[users[1] :]
