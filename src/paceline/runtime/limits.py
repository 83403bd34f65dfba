"""What an engine takes on, and whether a request fits. Knows numbers only: nothing is queued or reserved here."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from paceline.errors import CapacityError, RequestError
from paceline.runtime.sequence import Request


@dataclass(frozen=True)
class EngineLimits:
    """All counts are tokens, except `max_batch_size`: sequences that run at the same time."""

    max_seq_len: int  # prompt and output of one sequence
    max_batch_size: int
    max_num_tokens: int  # rows of one step
    total_token_limit: int | None = None  # sum of prompt and max_tokens over all running sequences
    request_default_max_tokens: int | None = None  # None: up to max_seq_len
    enable_chunked_prefill: bool = True
    scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict"
    enable_prefix_cache: bool = True


@dataclass(frozen=True)
class Admission:
    """The limits of an engine together with what its backend and drafters allow."""

    limits: EngineLimits
    vocab_size: int
    num_cache_tokens: int  # tokens the whole KV cache holds
    row_budget: int
    methods: Collection[str]  # speculation methods this engine can run

    def resolve(self, request: Request) -> Request:
        """The request with `max_tokens` filled in, never past `max_seq_len`.

        Raises RequestError for what is wrong in itself, CapacityError for what is right but too large for this engine.
        """
        self._check_prompt(request)
        self._check_token_ids(request)
        self._check_speculation(request)
        sampling, limits = request.sampling, self.limits
        num_prompt = len(request.prompt_token_ids)
        room = limits.max_seq_len - num_prompt
        if sampling.min_tokens > room:
            raise RequestError(
                f"`min_tokens` is {sampling.min_tokens}, but only {room} tokens fit between a prompt of {num_prompt} "
                f"tokens and `max_seq_len` ({limits.max_seq_len}).",
                "lower `min_tokens` or shorten the prompt",
                field="min_tokens",
            )
        max_tokens = sampling.max_tokens or max(limits.request_default_max_tokens or room, sampling.min_tokens)
        max_tokens = min(max_tokens, room)
        self._check_capacity(num_prompt, max_tokens)
        return replace(request, sampling=replace(sampling, max_tokens=max_tokens))

    def _check_prompt(self, request: Request) -> None:
        prompt, limits = request.prompt_token_ids, self.limits
        if not prompt:
            raise RequestError("`prompt` has no tokens.", "send at least one token", field="prompt")
        if len(prompt) >= limits.max_seq_len:
            raise RequestError(
                f"`prompt` has {len(prompt)} tokens; with `max_seq_len` {limits.max_seq_len} at most "
                f"{limits.max_seq_len - 1} fit, as one is left for the output.",
                "shorten the prompt, or build the engine with a larger `max_seq_len`",
                field="prompt",
            )
        for index, token_id in enumerate(prompt):
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"`prompt` token {index} must be an id from 0 to {self.vocab_size - 1}, got {token_id!r}.",
                    "tokenise the prompt with this model's tokenizer",
                    field="prompt",
                )
        if not limits.enable_chunked_prefill and len(prompt) > self.row_budget:
            raise CapacityError(
                f"`prompt` has {len(prompt)} tokens, and without chunked prefill at most {self.row_budget} run in a "
                "step.",
                "enable chunked prefill, or raise `max_num_tokens`",
            )

    def _check_token_ids(self, request: Request) -> None:
        sampling = request.sampling
        lists = {"stop_token_ids": sampling.stop_token_ids, "logit_bias": sampling.logit_bias}
        lists |= {"allowed_token_ids": sampling.allowed_token_ids or ()}
        lists |= {"bad_words": [i for w in sampling.bad_words for i in w], "prediction": request.prediction_token_ids}
        for field, token_ids in lists.items():
            for token_id in token_ids:
                if token_id >= self.vocab_size:
                    raise RequestError(
                        f"`{field}` token ids must be below {self.vocab_size}, got {token_id}.",
                        "use ids of this model's tokenizer",
                        field=field,
                    )

    def _check_speculation(self, request: Request) -> None:
        speculation = request.speculation
        if speculation.method is not None and speculation.method not in self.methods:
            known = ", ".join(sorted(self.methods)) or "none"
            raise RequestError(
                f"`speculation.method` must be one this engine was built with ({known}), got {speculation.method!r}.",
                "leave it out for the engine's own method",
                field="speculation.method",
            )
        wanted, most = speculation.num_draft_tokens, self.row_budget - 1
        if wanted is not None and (type(wanted) is not int or not 0 <= wanted <= most):
            raise RequestError(
                f"`speculation.num_draft_tokens` must be an integer from 0 to {most} (`max_num_tokens` - 1), got "
                f"{wanted!r}.",
                "leave it out for the engine's own number",
                field="speculation.num_draft_tokens",
            )

    def _check_capacity(self, num_prompt: int, max_tokens: int) -> None:
        """A single sequence that could never run is refused, rather than queued for ever."""
        total = num_prompt + max_tokens
        limit = self.limits.total_token_limit
        if limit is not None and total > limit:
            bound = f"`total_token_limit` ({limit})"
        elif total > self.num_cache_tokens:
            bound = f"the KV cache ({self.num_cache_tokens} tokens)"
        else:
            return
        raise CapacityError(
            f"a prompt of {num_prompt} tokens and `max_tokens` {max_tokens} make {total}, more than {bound}.",
            "lower `max_tokens`, shorten the prompt, or raise that limit",
        )
