from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.speedup import CostTable, expected_tokens, speedup, survival

rates = st.lists(st.floats(0, 1), max_size=16)


def test_survival_is_the_running_product():
    assert survival([0.5, 0.4, 1.0, 0.0, 0.9]) == pytest.approx([0.5, 0.2, 0.2, 0.0, 0.0])
    assert survival([]) == []


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("gamma", [0, 1, 4, 15])
def test_constant_rate_is_the_closed_form(alpha, gamma):
    assert expected_tokens([alpha] * gamma) == pytest.approx((1 - alpha ** (gamma + 1)) / (1 - alpha))


def test_expected_tokens_against_simulation():
    acceptance = np.array([0.9, 0.6, 0.8])
    accepted = np.random.default_rng(0).random((40_000, 3)) < acceptance
    simulated = 1 + np.cumprod(accepted, axis=1).sum(axis=1).mean()
    assert expected_tokens(acceptance.tolist()) == pytest.approx(simulated, abs=0.02)


@given(rates)
def test_expected_tokens_lies_between_one_and_all(acceptance):
    assert 1.0 <= expected_tokens(acceptance) <= len(acceptance) + 1 + 1e-9


def test_step_seconds_interpolates():
    costs = CostTable({16: 0.044, 1: 0.040, 64: 0.105})
    assert costs.step_seconds(1) == 0.040
    assert costs.step_seconds(16) == pytest.approx(0.044)
    assert costs.step_seconds(40) == pytest.approx(0.044 + 0.061 / 2)
    assert costs.step_seconds(128) == pytest.approx(0.210)
    assert CostTable({4: 0.01, 8: 0.02}).step_seconds(1) == 0.01


def test_speedup_is_the_formula():
    costs = CostTable({1: 0.040, 5: 0.050}, draft_seconds=0.004, overhead_seconds=0.001)
    assert speedup([0.8] * 4, costs) == pytest.approx(3.3616 * 0.040 / (4 * 0.004 + 0.050 + 0.001))
    assert speedup([], CostTable({1: 0.04})) == 1.0


def test_free_verification_and_drafting_give_expected_tokens():
    assert speedup([0.7] * 15, CostTable({1: 0.04, 16: 0.04})) == pytest.approx(expected_tokens([0.7] * 15))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (({},), "target_seconds"), (({0: 1.0},), "target_seconds"), (({1: 0.0},), "target_seconds"),
        (({1: math.nan},), "target_seconds"), (({1: 1.0}, -1.0), "draft_seconds"),
        (({1: 1.0}, 0.0, math.inf), "overhead_seconds"),
    ],
)  # fmt: skip
def test_impossible_measurements_are_refused(arguments, named):
    with pytest.raises(ValueError, match=named):
        CostTable(*arguments)
