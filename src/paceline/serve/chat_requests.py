"""/v1/chat/completions: from its body to what the engine runs.

Knows what a conversation's parameters mean for the template, the tools and the grammar.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import RequestError
from paceline.runtime.sequence import Request
from paceline.serve.chat import render_chat
from paceline.serve.openai_types import ChatCompletionRequest
from paceline.serve.reasoning import starts_in_thought
from paceline.serve.requests import (
    Job,
    ServedModel,
    check,
    common_fields,
    encode,
    new_id,
    sampling_params,
    speculation_params,
    truncated,
)
from paceline.serve.structured import grammar_from_request
from paceline.serve.tools import format_of, grammar_from_tools, has_tag_tokens, template_messages, template_tools


def chat_job(body: ChatCompletionRequest, model: ServedModel) -> Job:
    """Render the messages and make a request of them. Raises RequestError naming the parameter that is wrong."""
    check(body, model)
    if body.top_logprobs is not None and body.top_logprobs > 0 and not body.logprobs:
        raise RequestError("`top_logprobs` needs `logprobs`: true.", "set `logprobs`", field="top_logprobs")
    given = body.model_dump(exclude_none=True)
    tools, tool_choice = _tools(given)
    tool_format = format_of(model.chat_template)
    # The older form answers with one call.
    parallel = body.parallel_tool_calls is not False and body.functions is None
    grammars = [
        grammar_from_request(given),
        grammar_from_tools(tools, tool_choice, parallel, tool_format, has_tag_tokens(model.tokenizer)),
    ]
    if all(grammars):
        raise RequestError(
            "`tool_choice` and a structured output both constrain the output.", "send one of them", field="tool_choice"
        )
    shown = template_tools(tools, tool_choice)
    messages = template_messages([_flat(message) for message in given["messages"]])
    if "developer" not in (model.chat_template or ""):  # templates that do not know it leave such messages out
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    prompt = _rendered(body, model, messages, shown)
    sampling = sampling_params(
        body, model, logprobs=(body.top_logprobs or 0) if body.logprobs else None, max_tokens=_max_tokens(body),
        grammar=grammars[0] or grammars[1],
    )  # fmt: skip
    token_ids = truncated(body, model, encode(model, prompt, "messages", special=bool(body.add_special_tokens)))
    predicted: tuple[int, ...] = ()
    if body.prediction is not None:
        content = given["prediction"]["content"]
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        predicted = encode(model, text, "prediction", special=False)
    request = Request(
        new_id("chatcmpl", body.request_id), token_ids, sampling, speculation_params(body), body.priority,
        body.cache_salt, predicted,
    )  # fmt: skip
    last = messages[-1]
    echoed = [last["content"]] if body.echo and last["role"] == "assistant" else []
    return Job(
        [request], echoed, starts_in_thought(prompt), True, tuple(tool["function"]["name"] for tool in shown or ()),
        tool_format, legacy_functions=body.functions is not None, include_reasoning=body.include_reasoning,
        **common_fields(body),
    )  # fmt: skip


def _max_tokens(body: ChatCompletionRequest) -> int | None:
    """Clients that know both names send both; then the older one must not be the larger."""
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None and older > newer:
        raise RequestError(
            f"`max_tokens` ({older}) is above `max_completion_tokens` ({newer}), and both bound the output.",
            "send one of them",
            field="max_tokens",
        )
    return older if older is not None else newer


def _tools(given: Mapping[str, Any]) -> tuple[list[dict[str, Any]] | None, Any]:
    """`tools` and `tool_choice`, whichever way they are spelt."""
    functions, call = given.get("functions"), given.get("function_call")
    if functions is None and call is None:
        return given.get("tools"), given.get("tool_choice")
    for older, newer in (("functions", "tools"), ("function_call", "tool_choice")):
        if given.get(older) is not None and (given.get("tools") is not None or given.get("tool_choice") is not None):
            raise RequestError(f"`{older}` is the older form of `{newer}`.", "send the newer form alone", field=older)
    if functions is None:
        raise RequestError("`function_call` needs `functions`.", "send `functions`, or leave it out", "function_call")
    choice = {"type": "function", "function": call} if isinstance(call, Mapping) else call
    return [{"type": "function", "function": function} for function in functions], choice


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose text is one string, whatever parts it came in, and whose calls are in the newer form."""
    content = message.get("content")
    if isinstance(content, list):
        message = {**message, "content": "\n".join(part["text"] for part in content)}
    if message["role"] == "function":
        message = {**message, "role": "tool", "tool_call_id": message.get("name", "")}
    call = message.pop("function_call", None)
    if call is not None:
        message = {**message, "tool_calls": [{"id": call["name"], "type": "function", "function": call}]}
    if message.get("content") is None and message.get("refusal"):
        message = {**message, "content": message["refusal"]}
    return {key: value for key, value in message.items() if key not in ("annotations", "refusal")}


def _rendered(
    body: ChatCompletionRequest, model: ServedModel, messages: list[dict[str, Any]], tools: Any
) -> str:
    """The prompt's text."""
    wanted = dict(body.chat_template_kwargs or {})
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", *model.special_tokens):
        if name in wanted:
            raise RequestError(f"`chat_template_kwargs.{name}` is set by the server.", "leave it out",
                               field="chat_template_kwargs")  # fmt: skip
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "`continue_final_message` goes on with the last message, `add_generation_prompt` begins a new one.",
            "set one of them",
            field="continue_final_message",
        )
    variables = _effort(body, model.chat_template or "") | ({"tools": tools} if tools else {})
    if body.documents is not None:
        variables["documents"] = body.documents
    return render_chat(
        model.chat_template, messages, model.special_tokens,
        add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        **(variables | wanted),
    )  # fmt: skip


def _effort(body: ChatCompletionRequest, template: str) -> dict[str, Any]:
    """How hard to think and how much to say, for templates that know of it; for others they mean nothing."""
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        if "reasoning_effort" in template:
            variables["reasoning_effort"] = body.reasoning_effort
        if "enable_thinking" in template and body.reasoning_effort == "none":
            variables["enable_thinking"] = False
    if body.verbosity is not None and "verbosity" in template:
        variables["verbosity"] = body.verbosity
    return variables
