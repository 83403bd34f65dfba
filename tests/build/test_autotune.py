"""Choices from measurements: pure functions of given numbers, and the shape of what is measured."""

from __future__ import annotations

import pytest

from backends import backend_of, weights_of
from paceline.build import autotune
from paceline.build.autotune import choose_kernels, choose_num_draft_tokens, profile, row_buckets, this_machine
from paceline.build.manifest import Costs


def test_row_buckets_end_where_cost_rises():
    assert row_buckets({1: 1.0, 4: 1.05, 16: 1.1, 17: 1.5, 32: 1.6, 64: 3.0}) == [16, 32, 64]
    assert row_buckets({1: 1.0}) == [1]
    assert row_buckets({16: 1.0, 1: 1.0, 32: 1.0}) == [32]
    assert row_buckets({1: 1.0, 2: 2.0, 3: 3.0}) == [1, 2, 3]


def test_free_verification_drafts_the_most():
    flat = Costs(context=256, target=dict.fromkeys(range(1, 33), 0.01))
    count, gain, choice = choose_num_draft_tokens(flat, "suffix")
    assert 4.8 < gain < 4.9  # (1 - 0.8^16) / 0.2
    assert count == autotune.MAX_AUTO_DRAFT_TOKENS
    assert choice.chosen == "15" and "v(1) = 10.0 ms" in choice.because


def test_costly_verification_and_costly_drafts_draft_less():
    linear = Costs(context=256, target={n: 0.01 * n for n in range(1, 33)}, draft={1: 0.004})
    flat = Costs(context=256, target=dict.fromkeys(range(1, 33), 0.01), draft={1: 0.004})
    assert choose_num_draft_tokens(linear, "suffix")[0] == 1
    with_draft, suffix = choose_num_draft_tokens(flat, "draft")[0], choose_num_draft_tokens(flat, "suffix")[0]
    assert with_draft < suffix
    assert choose_num_draft_tokens(flat, "hybrid")[0] == with_draft


def test_buckets_bound_the_draft():
    """A step over 16 rows costs what one costs, 17 twice as much: γ + 1 stays within 16."""
    step = Costs(context=256, target={n: 0.01 if n <= 8 else 0.05 for n in range(1, 65)})
    assert choose_num_draft_tokens(step, "suffix")[0] == 7


def test_machine_is_stable_and_named():
    assert this_machine() == this_machine()
    assert len(this_machine().fingerprint) == 16 and this_machine().num_cores >= 1


def test_fingerprint_follows_the_cpu(monkeypatch):
    before = this_machine()
    monkeypatch.setattr(autotune, "cpu_features", lambda: "flags: avx | model name: Some CPU @ 3 GHz")
    assert this_machine().fingerprint != before.fingerprint
    assert this_machine().cpu == "Some CPU @ 3 GHz"


@pytest.fixture(scope="module")
def weights(tiny):
    return weights_of(tiny("llama")[0], "int8")


def test_profile_covers_what_fits_the_rows(weights):
    backend = backend_of(weights, "native", num_blocks=40, max_rows=128, max_seq_len=512)
    ticks = []
    costs = profile(backend, backend, 128, lambda done, total: ticks.append((done, total)))
    assert sorted(costs.target) == [n for n in autotune.ROWS if n <= 128]
    assert sorted(costs.draft) == [1, 2, 4, 8] and sorted(costs.prefill) == [128]
    assert all(seconds > 0 for kind in (costs.target, costs.draft, costs.prefill) for seconds in kind.values())
    assert ticks[-1] == (autotune.REPEATS, autotune.REPEATS)
    few = profile(backend, None, 16, lambda *_: None)
    assert max(few.target) == 16 and few.draft == few.prefill == {}


def test_slow_models_are_timed_less_often(weights, monkeypatch):
    monkeypatch.setattr(autotune, "SECONDS", 0.0)
    ticks = []
    backend = backend_of(weights, "native", num_blocks=40, max_rows=128, max_seq_len=512)
    profile(backend, None, 16, lambda done, total: ticks.append(done))
    assert ticks == [1, 2], "once to warm up, once to measure"


def test_threads_are_measured_and_on_record(weights, monkeypatch):
    monkeypatch.setattr(autotune, "available_cores", lambda: 2)
    kernels, [choice] = choose_kernels(weights, "cpu", None, True, lambda text: None)
    assert kernels.name == "native" and [c["num_threads"] for c in kernels.candidates] == [1, 2]
    best = min(kernels.candidates, key=lambda c: c["v1_ms"] + c["v16_ms"])
    assert kernels.num_threads == best["num_threads"]
    assert choice.chosen == f"native, {best['num_threads']} threads" and "step of 1 / 16 rows" in choice.because


def test_nothing_is_measured_when_not_asked(weights, monkeypatch):
    monkeypatch.setattr(autotune, "open_backend", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setattr(autotune, "available_cores", lambda: 2)
    kernels, [choice] = choose_kernels(weights, "cpu", None, False, lambda text: None)
    assert kernels.num_threads == 2 and "not measured" in choice.because
    kernels, [choice] = choose_kernels(weights, "cpu", 1, True, lambda text: None)
    assert kernels.num_threads == 1 and "`build.num_threads`" in choice.because


def test_a_step_of_several_sequences_gives_each_its_rows_and_blocks():
    seen = []

    class Backend:
        block_size, vocab_size = 16, 100

        def forward(self, batch):
            seen.append(batch)

    autotune.step_seconds(Backend(), num_rows=6, context=30, num_sequences=2)
    [batch] = seen
    assert batch.positions.tolist() == [30, 31, 32] * 2
    assert batch.sequence_of_row.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.block_tables.tolist() == [[0, 1, 2], [3, 4, 5]]
