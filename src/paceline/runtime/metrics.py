"""What an engine counts, and under which names. Knows no exporter: the server renders `Metrics.families()`.

Names and meanings are vLLM's, under `paceline:`. This is the only place where they are spelt.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from paceline.runtime.sequence import Sequence

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = tuple(float(1 << exponent) for exponent in range(18))


@dataclass
class Histogram:
    """Counts by upper bound (inclusive), as Prometheus has them, not yet cumulated; the last one has no bound."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


def _seconds() -> Histogram:
    return Histogram(_SECONDS)


def _tokens() -> Histogram:
    return Histogram(_TOKENS)


@dataclass(frozen=True)
class Family:
    """One metric ready to be exported. `values` maps a label value to a number; {"": x} has no label."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    label: str | None
    values: dict[str, float] | Histogram


@dataclass
class Metrics:
    """The state of an engine since it started. Counters only grow; gauges are up to date between any two calls."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage_perc: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    request_success: Counter[str] = field(default_factory=Counter)
    spec_decode_num_drafts: int = 0
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_num_accepted_tokens_per_pos: Counter[int] = field(default_factory=Counter)
    time_to_first_token_seconds: Histogram = field(default_factory=_seconds)
    inter_token_latency_seconds: Histogram = field(default_factory=_seconds)
    request_time_per_output_token_seconds: Histogram = field(default_factory=_seconds)
    e2e_request_latency_seconds: Histogram = field(default_factory=_seconds)
    request_queue_time_seconds: Histogram = field(default_factory=_seconds)
    request_prompt_tokens: Histogram = field(default_factory=_tokens)
    request_generation_tokens: Histogram = field(default_factory=_tokens)
    iteration_tokens_total: Histogram = field(default_factory=_tokens)
    step_phase_seconds: Counter[str] = field(default_factory=Counter)

    _phase: str | None = None
    _phase_started_at: float = 0.0

    def enter(self, phase: str | None) -> None:
        """The step is now in `phase` (schedule, draft, forward, verify or commit), None: it is over."""
        now = time.perf_counter()
        if self._phase is not None:
            self.step_phase_seconds[self._phase] += now - self._phase_started_at
        self._phase, self._phase_started_at = phase, now

    def record_tokens(self, sequence: Sequence, num_tokens: int, now: float) -> None:
        """A round gave the sequence `num_tokens` tokens."""
        stats = sequence.stats
        if stats.last_token_at is None:
            self._record_first_token(sequence, now)
        else:
            self.inter_token_latency_seconds.observe((now - stats.last_token_at) / num_tokens, num_tokens)
        stats.last_token_at = now
        stats.num_rounds += 1
        self.generation_tokens += num_tokens

    def _record_first_token(self, sequence: Sequence, now: float) -> None:
        stats = sequence.stats
        stats.first_token_at = now
        self.prompt_tokens += sequence.num_prompt_tokens
        self.prefix_cache_queries += sequence.num_prompt_tokens
        self.prefix_cache_hits += stats.num_cached_tokens
        self.request_queue_time_seconds.observe(stats.first_scheduled_at - stats.arrived_at)
        self.time_to_first_token_seconds.observe(now - stats.arrived_at)
        self.request_prompt_tokens.observe(sequence.num_prompt_tokens)

    def record_draft(self, sequence: Sequence, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """`num_accepted_tokens` became output; those after the end of the sequence do not count."""
        stats = sequence.stats
        stats.num_draft_tokens += num_draft_tokens
        stats.num_accepted_tokens += num_accepted_tokens
        for counts, number in (
            (stats.drafted_per_position, num_draft_tokens),
            (stats.accepted_per_position, num_accepted_tokens),
        ):
            counts.extend([0] * (num_draft_tokens - len(counts)))
            for position in range(number):
                counts[position] += 1
        self.spec_decode_num_drafts += 1
        self.spec_decode_num_draft_tokens += num_draft_tokens
        self.spec_decode_num_accepted_tokens += num_accepted_tokens
        for position in range(num_accepted_tokens):
            self.spec_decode_num_accepted_tokens_per_pos[position] += 1

    def record_finished(self, sequence: Sequence, now: float) -> None:
        stats = sequence.stats
        stats.finished_at = now
        stats.finish_reason = sequence.finish_reason.value
        self.request_success[sequence.finish_reason.value] += 1
        self.e2e_request_latency_seconds.observe(now - stats.arrived_at)
        self.request_generation_tokens.observe(sequence.num_output_tokens)
        if stats.first_token_at is not None and sequence.num_output_tokens > 1:
            per_token = (now - stats.first_token_at) / (sequence.num_output_tokens - 1)
            self.request_time_per_output_token_seconds.observe(per_token)

    def families(self) -> Iterator[Family]:
        """Every metric under its public name."""
        for attribute, (kind, text, label) in _FAMILIES.items():
            value = getattr(self, attribute)
            if isinstance(value, Counter):
                value = {str(key): float(number) for key, number in sorted(value.items())}
            elif not isinstance(value, Histogram):
                value = {"": float(value)}
            yield Family(f"paceline:{attribute}", kind, text, label, value)


# attribute of Metrics, and after "paceline:" its public name: (kind, help, label)
_FAMILIES: dict[str, tuple[Literal["gauge", "counter", "histogram"], str, str | None]] = {
    "num_requests_running": ("gauge", "Sequences in the running batch.", None),
    "num_requests_waiting": ("gauge", "Sequences waiting to run.", None),
    "kv_cache_usage_perc": ("gauge", "Share of KV cache blocks held by sequences, 0 to 1.", None),
    "num_preemptions": ("counter", "Sequences that lost their KV cache blocks and were queued again.", None),
    "prefix_cache_queries": ("counter", "Prompt tokens looked up in the prefix cache.", None),
    "prefix_cache_hits": ("counter", "Prompt tokens found in the prefix cache.", None),
    "prompt_tokens": ("counter", "Prompt tokens of sequences that got a first token.", None),
    "generation_tokens": ("counter", "Tokens generated.", None),
    "request_success": ("counter", "Sequences that ended, by reason.", "finished_reason"),
    "spec_decode_num_drafts": ("counter", "Drafts verified.", None),
    "spec_decode_num_draft_tokens": ("counter", "Draft tokens verified.", None),
    "spec_decode_num_accepted_tokens": ("counter", "Draft tokens that became output.", None),
    "spec_decode_num_accepted_tokens_per_pos": ("counter", "Accepted draft tokens by position.", "position"),
    "time_to_first_token_seconds": ("histogram", "From arrival to the first token.", None),
    "inter_token_latency_seconds": ("histogram", "Time between tokens; those of one round share its time.", None),
    "request_time_per_output_token_seconds": ("histogram", "Mean time per token after the first, by sequence.", None),
    "e2e_request_latency_seconds": ("histogram", "From arrival to the last token.", None),
    "request_queue_time_seconds": ("histogram", "From arrival to the first time scheduled.", None),
    "request_prompt_tokens": ("histogram", "Prompt tokens by sequence.", None),
    "request_generation_tokens": ("histogram", "Generated tokens by sequence.", None),
    "iteration_tokens_total": ("histogram", "Rows of a step.", None),
    "step_phase_seconds": ("counter", "Seconds spent in each phase of a step.", "phase"),
}
