from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.runtime.drafting.prediction import PredictionTracker


def follow(prediction, output, limit=16):
    """Rounds that decoding `output` takes with drafts of at most `limit`, and how many draft tokens were wrong."""
    tracker = PredictionTracker(prediction)
    tracker.advance(output[:1])
    position, rounds, wrong = 1, 1, 0
    while position < len(output):
        room = min(limit, len(output) - position - 1)  # the last token comes from the target in any case
        draft = tracker.draft(room)
        assert len(draft) <= room
        right = 0
        while right < len(draft) and draft[right] == output[position + right]:
            right += 1
        wrong += len(draft) - right
        tracker.advance(output[position : position + right + 1])
        position += right + 1
        rounds += 1
    return rounds, wrong, tracker.num_matched


R = random.Random(3)
FILE = [R.choice([1, 2, 3, R.randrange(4, 400)]) for _ in range(1200)]  # some tokens are everywhere, as in code
NEW = list(range(1000, 1040))


def test_an_unchanged_file_is_drafted_whole():
    rounds, wrong, matched = follow(FILE, FILE)
    assert rounds <= 1200 / 17 + 5 and wrong == 0 and matched == 1200


@pytest.mark.parametrize(
    "output",
    [
        NEW[:9] + FILE,  # an introduction
        FILE[:500] + NEW + FILE[500:],  # an insertion
        FILE[:500] + FILE[540:],  # a deletion
        FILE[:500] + NEW[:3] + FILE[501:],  # a replacement
        FILE[:300] + FILE[400:500] + FILE[300:400] + FILE[500:],  # a block moved
        [token + 5000 if token == 3 else token for token in FILE[:60]] + FILE[60:],  # a name replaced everywhere
    ],
)
def test_an_edit_is_left_behind_within_a_few_tokens(output):
    rounds, wrong, matched = follow(FILE, output)
    new = sum(token >= 1000 for token in output)
    assert rounds <= len(output) / 17 + new + 60
    assert matched >= len(output) - new - 40
    assert wrong <= 16 * 8 + 8 * new


def test_what_was_not_predicted_at_all_drafts_little():
    other = [R.randrange(4, 400) for _ in range(600)]
    _, wrong, _ = follow(FILE, other)
    assert wrong < 600, "less than a wasted row a token"


def test_drafts_grow_with_what_came_as_predicted():
    tracker = PredictionTracker(list(range(100)))
    assert tracker.follows and len(tracker.draft(64)) == 4
    tracker.advance([0, 1])
    assert tracker.draft(64) == list(range(2, 10))
    tracker.advance(range(2, 10))
    assert len(tracker.draft(64)) == 40 and tracker.draft(3) == [10, 11, 12] and tracker.draft(0) == []
    tracker.advance(range(10, 100))
    assert not tracker.follows and tracker.draft(9) == []
    tracker.advance([55])
    assert tracker.num_matched == 100


tokens = st.lists(st.integers(0, 3), max_size=30)


@given(tokens, tokens)
@settings(max_examples=300, deadline=None)
def test_drafts_are_pieces_of_the_prediction_whatever_the_output(prediction, output):
    tracker = PredictionTracker(prediction)
    for token in output:
        tracker.advance([token])
        draft = tracker.draft(5)
        assert not draft or any(prediction[i : i + len(draft)] == draft for i in range(len(prediction)))
        assert bool(draft) == tracker.follows
    assert tracker.num_matched <= len(output)
