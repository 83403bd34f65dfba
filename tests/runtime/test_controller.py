from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.controller import FixedController
from paceline.runtime.sequence import Request, Sequence, SpeculationParams


def sequences(*wishes):
    return [Sequence(Request("r", (1,), speculation=SpeculationParams(num_draft_tokens=wish))) for wish in wishes]


def test_every_sequence_gets_the_engine_s_number_or_its_own():
    assert FixedController(5).limits(sequences(None, 0, 9, None), 100) == [5, 0, 9, 5]
    assert FixedController(5).limits([], 100) == []


def test_scarce_rows_are_shared_equally_and_what_one_leaves_goes_on():
    assert FixedController(4).limits(sequences(None, None, None), 7) == [2, 2, 3]
    assert FixedController(4).limits(sequences(1, None, None), 7) == [1, 3, 3]
    assert FixedController(4).limits(sequences(None, None, None), 2) == [0, 1, 1]
    assert FixedController(4).limits(sequences(None, None), 0) == [0, 0]


@given(st.integers(0, 15), st.lists(st.none() | st.integers(0, 20), max_size=12), st.integers(0, 60))
def test_limits_never_exceed_the_rows_or_the_wishes(num_draft_tokens, wishes, free_rows):
    limits = FixedController(num_draft_tokens).limits(sequences(*wishes), free_rows)
    wanted = [num_draft_tokens if wish is None else wish for wish in wishes]
    assert all(0 <= limit <= wish for limit, wish in zip(limits, wanted, strict=True))
    assert sum(limits) <= free_rows
    if sum(wanted) <= free_rows // max(len(wanted), 1):
        assert limits == wanted


def test_a_negative_number_is_refused():
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        FixedController(-1)
