"""/v1/completions: from its body to what the engine runs."""

from __future__ import annotations

from paceline.errors import RequestError
from paceline.runtime.sequence import Request
from paceline.serve.openai_types import CompletionRequest
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

MAX_PROMPTS = 1024  # of one request
# What fill-in-the-middle prompts are made of, by family: before, after, and where the middle begins.
_FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
)


def completion_job(body: CompletionRequest, model: ServedModel) -> Job:
    """One request per prompt. Raises RequestError naming the parameter that is wrong."""
    check(body, model)
    prompts = _prompts(body)
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise RequestError(
            f"`prompt` must be 1 to {MAX_PROMPTS} prompts, got {len(prompts)}.", "send several requests", field="prompt"
        )
    if body.best_of not in (None, body.n or 1):
        raise RequestError(
            f"`best_of` must be `n` ({body.n or 1}), got {body.best_of}: choices are not generated to be thrown away.",
            "ask for more choices with `n`, and choose by `logprobs`",
            field="best_of",
        )
    if body.suffix is not None:
        encoded = [_fill_in_the_middle(model, prompt, body.suffix) for prompt in prompts]
    else:
        special = body.add_special_tokens is not False
        encoded = [
            encode(model, prompt, "prompt", special) if isinstance(prompt, str) else tuple(prompt) for prompt in prompts
        ]
    encoded = [truncated(body, model, token_ids) for token_ids in encoded]
    # With an echo, `logprobs` are the prompt's too, and nothing need be generated: how evaluations score a text.
    prompt_only = bool(body.echo) and body.max_tokens == 0
    if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
        body = body.model_copy(update={"prompt_logprobs": body.logprobs})
        common = common_fields(body) | {"prompt_logprobs_wanted": False}
    else:
        common = common_fields(body)
    sampling = sampling_params(
        body, model, logprobs=body.logprobs, max_tokens=1 if prompt_only else body.max_tokens,
        grammar=grammar_from_request(body.model_dump(exclude_none=True)),
    )  # fmt: skip
    name = new_id("cmpl", body.request_id)
    requests = [
        Request(f"{name}-{index}", ids, sampling, speculation_params(body), body.priority, body.cache_salt)
        for index, ids in enumerate(encoded)
    ]
    texts = []
    if body.echo:
        shown = zip(prompts, encoded, strict=True)
        texts = [
            prompt if isinstance(prompt, str) and body.truncate_prompt_tokens is None
            else model.tokenizer.decode(ids, skip_special_tokens=False)
            for prompt, ids in shown
        ]  # fmt: skip
    return Job(requests, texts, prompt_only=prompt_only, **common)


def _prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    return prompt


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
    start = encode(model, prompt, "prompt", special=False) if isinstance(prompt, str) else tuple(prompt)
    return (before, *start, after, *encode(model, suffix, "suffix", special=False), middle)
