from __future__ import annotations

import dataclasses

import pytest

from paceline.runtime.metrics import Histogram, Metrics
from paceline.runtime.sequence import FinishReason, Request, Sequence


def sequence_at(arrived, scheduled):
    sequence = Sequence(Request("r", (1, 2, 3, 4)))
    sequence.stats.arrived_at, sequence.stats.first_scheduled_at = arrived, scheduled
    sequence.stats.num_cached_tokens = 2
    return sequence


def test_a_histogram_counts_by_inclusive_upper_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 7.0):
        histogram.observe(value)
    histogram.observe(2.5, times=3)
    assert histogram.counts == [2, 2, 4]
    assert (histogram.count, histogram.sum) == (8, 19.5)


def test_a_sequence_is_timed_from_arrival_to_end():
    metrics, sequence = Metrics(), sequence_at(10.0, 10.5)
    metrics.record_tokens(sequence, 1, now=11.0)
    metrics.record_tokens(sequence, 4, now=13.0)
    sequence.token_ids += [5] * 5
    sequence.finish_reason = FinishReason.LENGTH
    metrics.record_finished(sequence, now=13.0)
    assert metrics.request_queue_time_seconds.sum == 0.5
    assert metrics.time_to_first_token_seconds.sum == 1.0
    assert (metrics.inter_token_latency_seconds.count, metrics.inter_token_latency_seconds.sum) == (4, 2.0)
    assert metrics.request_time_per_output_token_seconds.sum == 0.5
    assert metrics.e2e_request_latency_seconds.sum == 3.0
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (4, 5)
    assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (4, 2)
    assert metrics.request_success == {"length": 1}
    stats = sequence.stats
    assert (stats.first_token_at, stats.last_token_at, stats.finished_at, stats.num_rounds) == (11.0, 13.0, 13.0, 2)


def test_a_sequence_cancelled_before_its_first_token_has_no_time_per_token():
    metrics, sequence = Metrics(), sequence_at(1.0, None)
    sequence.finish_reason = FinishReason.CANCELLED
    metrics.record_finished(sequence, now=2.0)
    assert metrics.request_time_per_output_token_seconds.count == 0
    assert metrics.request_success == {"cancelled": 1}


def test_drafts_are_counted_by_position_for_the_sequence_and_for_all():
    metrics, first, second = Metrics(), sequence_at(0, 0), sequence_at(0, 0)
    metrics.record_draft(first, 2, 1)
    metrics.record_draft(first, 4, 3)
    metrics.record_draft(second, 1, 1)
    assert first.stats.drafted_per_position == [2, 2, 1, 1]
    assert first.stats.accepted_per_position == [2, 1, 1, 0]
    assert (first.stats.num_draft_tokens, first.stats.num_accepted_tokens) == (6, 4)
    assert metrics.spec_decode_num_accepted_tokens_per_pos == {0: 3, 1: 1, 2: 1}
    assert (metrics.spec_decode_num_drafts, metrics.spec_decode_num_draft_tokens) == (3, 7)


def test_every_metric_is_exported_once_under_its_public_name():
    metrics = Metrics(num_requests_running=3)
    metrics.request_success["stop"] += 2
    families = {family.name: family for family in metrics.families()}
    public = [field.name for field in dataclasses.fields(Metrics) if not field.name.startswith("_")]
    assert list(families) == [f"paceline:{name}" for name in public]
    assert families["paceline:num_requests_running"].values == {"": 3.0}
    assert families["paceline:request_success"].values == {"stop": 2.0}
    assert families["paceline:request_success"].label == "finished_reason"
    for family in families.values():
        assert (family.kind == "histogram") == isinstance(family.values, Histogram)
        assert family.help.endswith(".")


def test_phases_of_a_step_add_up():
    metrics = Metrics()
    for phase in ("schedule", "forward", "schedule", None):
        metrics.enter(phase)
    assert set(metrics.step_phase_seconds) == {"schedule", "forward"}
    before = dict(metrics.step_phase_seconds)
    metrics.enter("forward")
    metrics.enter(None)
    assert metrics.step_phase_seconds["schedule"] == before["schedule"]
    assert metrics.step_phase_seconds["forward"] == pytest.approx(before["forward"], abs=1.0)
