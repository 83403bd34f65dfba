"""From a request's body to what the engine runs. Knows the API's parameters and the model's tokenizer and template;
knows neither HTTP nor how answers are spelt."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from paceline.errors import RequestError
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.sequence import Request, SpeculationParams
from paceline.serve.chat import render_chat
from paceline.serve.openai_types import ChatCompletionRequest, CompletionRequest, Generation
from paceline.serve.reasoning import ReasoningSplitter, starts_in_thought
from paceline.serve.structured import grammar_from_request
from paceline.serve.tools import (
    ToolCallParser,
    format_of,
    grammar_from_tools,
    has_tag_tokens,
    template_messages,
    template_tools,
)

MAX_PROMPTS = 1024  # of one request
# What fill-in-the-middle prompts are made of, by family: before, after, and where the middle begins.
_FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
)


@dataclass(frozen=True)
class ServedModel:
    """What the server knows of its model besides the engine."""

    name: str
    tokenizer: tokenizers.Tokenizer
    chat_template: str | None
    max_seq_len: int
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    method: str | None = None  # default speculation method
    num_draft_tokens: int = 0


@dataclass(frozen=True)
class Job:
    """The requests of one body, and how their output is to be read."""

    requests: list[Request]
    prompts: list[str]  # text of each, for `echo`
    in_thought: bool = False
    reads_answer: bool = False  # a chat: thoughts and calls are told from the answer
    tool_names: tuple[str, ...] = ()
    tool_format: str = "hermes"

    @property
    def num_choices(self) -> int:
        return sum(request.sampling.n for request in self.requests)

    def splitter(self) -> ReasoningSplitter:
        return ReasoningSplitter(self.in_thought)

    def parser(self) -> ToolCallParser | None:
        return ToolCallParser(self.tool_format, self.tool_names) if self.tool_names else None


def chat_job(body: ChatCompletionRequest, model: ServedModel) -> Job:
    """Render the messages and make a request of them. Raises RequestError naming the parameter that is wrong."""
    _check(body, model)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise RequestError(
            "`max_tokens` and `max_completion_tokens` are the same.", "send one of them", field="max_tokens"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("`top_logprobs` needs `logprobs`: true.", "set `logprobs`", field="top_logprobs")
    given = body.model_dump(exclude_none=True)
    tools, tool_choice = given.get("tools"), given.get("tool_choice")
    tool_format = format_of(model.chat_template)
    grammars = [
        grammar_from_request(given),
        grammar_from_tools(
            tools, tool_choice, body.parallel_tool_calls is not False, tool_format, has_tag_tokens(model.tokenizer)
        ),
    ]
    if all(grammars):
        raise RequestError(
            "`tool_choice` and a structured output both constrain the output.", "send one of them", field="tool_choice"
        )
    shown = template_tools(tools, tool_choice)
    variables = dict(body.chat_template_kwargs or {}) | ({"tools": shown} if shown else {})
    messages = template_messages([_flat(message) for message in given["messages"]])
    for name in ("messages", "add_generation_prompt", *model.special_tokens):
        if name in (body.chat_template_kwargs or {}):
            raise RequestError(f"`chat_template_kwargs.{name}` is set by the server.", "leave it out",
                               field="chat_template_kwargs")  # fmt: skip
    prompt = render_chat(model.chat_template, messages, model.special_tokens, **variables)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = _sampling(body, logprobs, body.max_completion_tokens, grammars[0] or grammars[1])
    request = Request(_new_id("chatcmpl"), _encode(model, prompt, "messages", special=False), sampling,
                      _speculation(body), body.priority)  # fmt: skip
    names = tuple(tool["function"]["name"] for tool in shown or ())
    return Job([request], [prompt], starts_in_thought(prompt), True, names, tool_format)


def completion_job(body: CompletionRequest, model: ServedModel) -> Job:
    """One request per prompt. Raises RequestError naming the parameter that is wrong."""
    _check(body, model)
    if body.echo and body.logprobs is not None:
        raise RequestError(
            "`echo` with `logprobs` would need the prompt's log-probabilities, which are not computed.",
            "leave out one of them",
            field="echo",
        )
    prompts = _prompts(body)
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise RequestError(
            f"`prompt` must be 1 to {MAX_PROMPTS} prompts, got {len(prompts)}.", "send several requests", field="prompt"
        )
    if body.suffix is not None:
        encoded = [_fill_in_the_middle(model, prompt, body.suffix) for prompt in prompts]
    else:
        encoded = [
            _encode(model, prompt, "prompt", special=True) if isinstance(prompt, str) else tuple(prompt)
            for prompt in prompts
        ]
    sampling = _sampling(body, body.logprobs, None, grammar_from_request(body.model_dump(exclude_none=True)))
    name = _new_id("cmpl")
    requests = [
        Request(f"{name}-{index}", token_ids, sampling, _speculation(body), body.priority)
        for index, token_ids in enumerate(encoded)
    ]
    texts = []
    if body.echo:
        texts = [p if isinstance(p, str) else model.tokenizer.decode(p, skip_special_tokens=False) for p in prompts]
    return Job(requests, texts)


def _check(body: Generation, model: ServedModel) -> None:
    if body.model not in (None, "", model.name):
        raise UnknownModelError(body.model, model.name)
    if body.stream_options is not None and not body.stream:
        raise RequestError("`stream_options` needs `stream`: true.", "leave it out", field="stream_options")


class UnknownModelError(RequestError):
    http_status = 404

    def __init__(self, wanted: str, served: str):
        super().__init__(f"`model` {wanted[:100]!r} is not served here.", f"this server has `{served}`", field="model")


def _prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return prompt


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose text is one string, whatever parts it came in."""
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return message


def _encode(model: ServedModel, text: str, name: str, special: bool) -> tuple[int, ...]:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"`{name}` has a lone surrogate, which is no character.", "send valid Unicode", field=name
        ) from error
    return tuple(model.tokenizer.encode(text, add_special_tokens=special).ids)


def _fill_in_the_middle(model: ServedModel, prompt: str | list[int], suffix: str) -> tuple[int, ...]:
    for names in _FIM_TOKENS:
        before, after, middle = (model.tokenizer.token_to_id(name) for name in names)
        if None not in (before, after, middle):
            break
    else:
        raise RequestError(
            "`suffix` needs a model trained to fill in the middle, and this one has no tokens for it.",
            "leave it out, or serve a code model such as Qwen2.5-Coder",
            field="suffix",
        )
    start = _encode(model, prompt, "prompt", special=False) if isinstance(prompt, str) else tuple(prompt)
    return (before, *start, after, *_encode(model, suffix, "suffix", special=False), middle)


_SAME_NAME = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "ignore_eos", "include_stop_str_in_output", "n",
)  # fmt: skip


def _sampling(body: Generation, logprobs: int | None, max_tokens: int | None, grammar: Any) -> SamplingParams:
    given = {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if logprobs is None and body.return_token_details:
        logprobs = 0
    return SamplingParams(
        **given,
        max_tokens=body.max_tokens if max_tokens is None else max_tokens,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias or {}),
        logprobs=logprobs,
        grammar=grammar,
    )


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    wrong = [key for key in biases if not (key.isascii() and key.isdigit() and len(key) < 10)]
    if wrong:
        raise RequestError(
            f"`logit_bias` must map token ids to biases, got the key {wrong[0][:50]!r}.",
            "use /tokenize to find ids",
            field="logit_bias",
        )
    return {int(key): bias for key, bias in biases.items()}


def _speculation(body: Generation) -> SpeculationParams:
    wanted = body.speculation
    return SpeculationParams() if wanted is None else SpeculationParams(**wanted.model_dump())


_counter = itertools.count()


def _new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}{next(_counter):x}"
