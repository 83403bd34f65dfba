from __future__ import annotations

import pytest

from paceline.errors import CapacityError, RequestError
from paceline.runtime.limits import Admission, EngineLimits
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.sequence import Request, SpeculationParams


def admission(**changes):
    limits = {"max_seq_len": 20, "max_batch_size": 4, "max_num_tokens": 8} | changes
    methods = {"suffix", "draft"}
    return Admission(EngineLimits(**limits), vocab_size=100, num_cache_tokens=16, row_budget=8, methods=methods)


def request(prompt=(1, 2, 3), speculation=None, **sampling):
    return Request("r", prompt, SamplingParams(**({"max_tokens": 4} | sampling)), speculation or SpeculationParams())


REFUSED = [
    (
        request(prompt=()),
        {},
        RequestError("`prompt` has no tokens.", "send at least one token", "prompt"),
    ),
    (
        request(prompt=(1,) * 20),
        {},
        RequestError(
            "`prompt` has 20 tokens; with `max_seq_len` 20 at most 19 fit, as one is left for the output.",
            "shorten the prompt, or build the engine with a larger `max_seq_len`",
            "prompt",
        ),
    ),
    *(
        (
            request(prompt=(1, bad)),
            {},
            RequestError(
                f"`prompt` token 1 must be an id from 0 to 99, got {bad!r}.",
                "tokenise the prompt with this model's tokenizer",
                "prompt",
            ),
        )
        for bad in (100, -1, 2**70, 1.0, True, "1", None, float("nan"))
    ),
    (
        request(stop_token_ids=(5, 100)),
        {},
        RequestError(
            "`stop_token_ids` token ids must be below 100, got 100.",
            "use ids of this model's tokenizer",
            "stop_token_ids",
        ),
    ),
    (
        request(logit_bias={7: 1.0, 123: 1.0}),
        {},
        RequestError(
            "`logit_bias` token ids must be below 100, got 123.", "use ids of this model's tokenizer", "logit_bias"
        ),
    ),
    (
        request(speculation=SpeculationParams(method="magic")),
        {},
        RequestError(
            "`speculation.method` must be one this engine was built with (draft, suffix), got 'magic'.",
            "leave it out for the engine's own method",
            "speculation.method",
        ),
    ),
    *(
        (
            request(speculation=SpeculationParams(num_draft_tokens=bad)),
            {},
            RequestError(
                f"`speculation.num_draft_tokens` must be an integer from 0 to 7 (`max_num_tokens` - 1), got {bad!r}.",
                "leave it out for the engine's own number",
                "speculation.num_draft_tokens",
            ),
        )
        for bad in (-1, 8, 2.0, True, "4")
    ),
    (
        request(min_tokens=18, max_tokens=None),
        {},
        RequestError(
            "`min_tokens` is 18, but only 17 tokens fit between a prompt of 3 tokens and `max_seq_len` (20).",
            "lower `min_tokens` or shorten the prompt",
            "min_tokens",
        ),
    ),
    (
        request(prompt=(1,) * 9),
        {"enable_chunked_prefill": False},
        CapacityError(
            "`prompt` has 9 tokens, and without chunked prefill at most 8 run in a step.",
            "enable chunked prefill, or raise `max_num_tokens`",
        ),
    ),
    (
        request(max_tokens=14),
        {},
        CapacityError(
            "a prompt of 3 tokens and `max_tokens` 14 make 17, more than the KV cache (16 tokens).",
            "lower `max_tokens`, shorten the prompt, or raise that limit",
        ),
    ),
    (
        request(max_tokens=4),
        {"total_token_limit": 6},
        CapacityError(
            "a prompt of 3 tokens and `max_tokens` 4 make 7, more than `total_token_limit` (6).",
            "lower `max_tokens`, shorten the prompt, or raise that limit",
        ),
    ),
]


@pytest.mark.parametrize(("asked", "limits", "expected"), REFUSED)
def test_what_cannot_be_served_is_refused_with_numbers_and_a_hint(asked, limits, expected):
    with pytest.raises(type(expected)) as caught:
        admission(**limits).resolve(asked)
    assert str(caught.value) == str(expected)
    assert getattr(caught.value, "field", None) == getattr(expected, "field", None)


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "default", "resolved"),
    [(4, 0, 7, 4), (None, 0, 7, 7), (None, 9, 7, 9), (None, 0, None, 13), (13, 0, None, 13)],
)
def test_max_tokens_is_filled_in(max_tokens, min_tokens, default, resolved):
    asked = request(max_tokens=max_tokens, min_tokens=min_tokens)
    limits = admission(request_default_max_tokens=default, max_seq_len=16)
    assert limits.resolve(asked).sampling.max_tokens == resolved


def test_max_tokens_is_cut_at_max_seq_len_and_nothing_else_is_changed():
    asked = request(prompt=(99,) * 12, max_tokens=1000, seed=3, stop_token_ids=(99,))
    resolved = admission(max_seq_len=16).resolve(asked)
    assert resolved.sampling.max_tokens == 4
    assert resolved == Request("r", (99,) * 12, SamplingParams(max_tokens=4, seed=3, stop_token_ids=(99,)))
