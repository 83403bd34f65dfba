"""What the endpoints' requests have in common: from a body's parameters to what the engine runs.

Knows the API's parameters and the model's tokenizer; knows neither HTTP, nor how answers are spelt, nor what is
particular to an endpoint (`chat_requests.py`, `completion_requests.py`, `response_requests.py`).
"""

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
from paceline.serve.openai_types import Generation, StreamOptions
from paceline.serve.reasoning import ReasoningSplitter
from paceline.serve.tools import ToolCallParser


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
    fingerprint: str | None = None  # of the engine: the same one gives the same answers


@dataclass(frozen=True)
class Job:
    """The requests of one body, and how their output is to be read and answered."""

    requests: list[Request]
    prompts: list[str] = field(default_factory=list)  # what an echo begins with, by request
    in_thought: bool = False
    reads_answer: bool = False  # a chat: thoughts and calls are told from the answer
    tool_names: tuple[str, ...] = ()
    tool_format: str = "hermes"
    legacy_functions: bool = False  # calls are answered as `function_call`
    include_reasoning: bool = True
    prompt_only: bool = False  # nothing was to be generated: an output is thrown away
    token_details: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False
    prompt_logprobs_wanted: bool = False  # as a field of their own, not only for an echo
    service_tier: str | None = None
    stream_options: StreamOptions = field(default_factory=StreamOptions)

    @property
    def num_choices(self) -> int:
        return sum(request.sampling.n for request in self.requests)

    def splitter(self) -> ReasoningSplitter:
        return ReasoningSplitter(self.in_thought)

    def parser(self) -> ToolCallParser | None:
        return ToolCallParser(self.tool_format, self.tool_names) if self.tool_names else None


def common_fields(body: Generation) -> dict[str, Any]:
    """The fields of a Job that every body has."""
    return {
        "token_details": body.return_token_details,
        "token_ids": body.return_token_ids,
        "tokens_as_ids": body.return_tokens_as_token_ids,
        "prompt_logprobs_wanted": body.prompt_logprobs is not None,
        "service_tier": None if body.service_tier is None else "default",
        "stream_options": body.stream_options or StreamOptions(),
    }


def check_model(name: str | None, model: ServedModel) -> None:
    """Raises UnknownModelError unless `name` is the model's, or none."""
    if name not in (None, "", model.name):
        raise UnknownModelError(name, model.name)


def check(body: Generation, model: ServedModel) -> None:
    check_model(body.model, model)
    if body.stream_options is not None and not body.stream:
        raise RequestError("`stream_options` needs `stream`: true.", "leave it out", field="stream_options")


class UnknownModelError(RequestError):
    http_status = 404

    def __init__(self, wanted: str, served: str):
        super().__init__(f"`model` {wanted[:100]!r} is not served here.", f"this server has `{served}`", field="model")


def encode(model: ServedModel, text: str, name: str, special: bool) -> tuple[int, ...]:
    """Token ids of a text; `special`: with what the tokenizer puts before every text. RequestError names `name`."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"`{name}` has a lone surrogate, which is no character.", "send valid Unicode", field=name
        ) from error
    return tuple(model.tokenizer.encode(text, add_special_tokens=special).ids)


def truncated(body: Generation, model: ServedModel, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The prompt as far as `truncate_prompt_tokens` keeps it: its last tokens, or with `truncation_side` "right" its
    first. -1 keeps what leaves room for `max_tokens` (for one token, if it is not given)."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == -1:
        keep = max(1, model.max_seq_len - max(1, body.max_tokens or 1))
    if keep == 0:
        raise RequestError(
            "`truncate_prompt_tokens` 0 would leave no prompt.",
            "keep at least one token",
            field="truncate_prompt_tokens",
        )
    return token_ids[:keep] if body.truncation_side == "right" else token_ids[-keep:]


_SAME_NAME = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "n",
    "prompt_logprobs",
)  # fmt: skip


def sampling_params(
    body: Generation, model: ServedModel, *, logprobs: int | None, max_tokens: int | None, grammar: Any
) -> SamplingParams:
    """How to sample, by the parameters that every endpoint has. Raises RequestError naming the one that is wrong."""
    given = {name: getattr(body, name) for name in _SAME_NAME if getattr(body, name) is not None}
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if logprobs is None and body.return_token_details:
        logprobs = 0
    allowed = body.allowed_token_ids
    return SamplingParams(
        **given,
        max_tokens=max_tokens,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        logit_bias=_logit_bias(body.logit_bias or {}),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=_bad_words(model, body.bad_words or []),
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


def _bad_words(model: ServedModel, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as the tokens it has at the beginning of a text, and as those it has after a space, as in vLLM."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise RequestError(
                "`bad_words` must be words, got one that is blank.", "leave it out", field="bad_words"
            )
        alone, spaced = (encode(model, text, "bad_words", special=False) for text in (bare, f" {bare}"))
        found[alone] = None
        # A tokenizer that makes the space a token of its own would forbid that: then both are the same word.
        if spaced[0] != alone[0] and len(spaced) == len(alone):
            found[spaced] = None
    return tuple(word for word in found if word)


def speculation_params(body: Generation) -> SpeculationParams:
    wanted = body.speculation
    return SpeculationParams() if wanted is None else SpeculationParams(**wanted.model_dump())


_counter = itertools.count()


def new_id(prefix: str, wanted: str | None = None) -> str:
    """A request's id: the one its client wants, or one that nobody else has."""
    return f"{prefix}-{wanted or f'{secrets.token_hex(12)}{next(_counter):x}'}"
