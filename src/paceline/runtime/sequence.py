"""A request and its sequences: what was asked, what is known so far. Knows nothing of scheduling or models."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from paceline.runtime.drafting.prediction import PredictionTracker
from paceline.runtime.grammar import GrammarMatcher
from paceline.runtime.logprobs import TokenLogprobs
from paceline.runtime.sampling import SamplingParams


class FinishReason(str, enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class SpeculationParams:
    """Per-request speculation: `enabled` False turns it off; the others override the engine's (None = the engine's)."""

    enabled: bool = True
    num_draft_tokens: int | None = None
    method: str | None = None  # "draft" | "suffix" | "hybrid"


@dataclass(frozen=True)
class Request:
    """One prompt, already tokenised, and how to continue it. `request_id` is unique among unfinished requests.

    Requests of different `cache_salt` share nothing: neither cached prefixes nor the corpus that drafts come from.
    `prediction_token_ids` is what the output may look like, the first source of drafts.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    priority: int = 0  # lower runs first
    cache_salt: str | None = None
    prediction_token_ids: tuple[int, ...] = ()


@dataclass
class SequenceStats:
    """What speculation did for one sequence. Times are `time.perf_counter()` seconds."""

    arrived_at: float = field(default_factory=time.perf_counter)
    first_scheduled_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    finished_at: float | None = None
    finish_reason: str | None = None
    num_rounds: int = 0  # target forward passes that yielded at least one token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_matched_tokens: int = 0  # output tokens that came as the request's prediction has them
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)


class Sequence:
    """The known tokens of one choice of a request, and how many of them are in the target's KV cache.

    `token_ids` is prompt then output. `num_computed_tokens` of them have K and V in `block_table`. All known tokens
    but the last are computed while decoding; the last is the next step's first row.
    """

    def __init__(self, request: Request, index: int = 0):
        self.request = request
        self.index = index  # which of the request's n choices
        self.sequence_id = f"{request.request_id}/{index}"
        self.sampling = request.sampling.for_choice(index)
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.origins: list[str] = []  # per output token: "target", or its draft's source
        self.grammar: GrammarMatcher | None = None  # of `sampling.grammar`, past the output tokens
        self.prediction = PredictionTracker(request.prediction_token_ids) if request.prediction_token_ids else None
        # What `sampling.prompt_logprobs` asks for, as far as it is computed; None: nothing. The first token has none.
        wanted = index == 0 and self.sampling.prompt_logprobs is not None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if wanted else None
        self.finish_reason: FinishReason | None = None
        self.stats = SequenceStats()

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_prompt_logprobs_missing(self) -> int:
        """Prompt tokens whose log-probabilities are wanted and not computed yet."""
        return 0 if self.prompt_logprobs is None else self.num_prompt_tokens - len(self.prompt_logprobs)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
