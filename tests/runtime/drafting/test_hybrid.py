from __future__ import annotations

import pytest

from paceline.runtime.drafting.drafter import Draft
from paceline.runtime.drafting.hybrid import AcceptanceRate, HybridDrafter
from paceline.runtime.drafting.suffix import SuffixDrafter
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.sequence import Request, Sequence
from paceline.runtime.speedup import CostTable
from paceline.runtime.verify import Verdict

FLAT = {1: 0.04, 16: 0.04}  # verification is free


class ModelStandIn:
    """Drafts 1000, 1001, ... and records what it was asked."""

    def __init__(self, num_tokens: int = 99):
        self.num_tokens = num_tokens
        self.asked: list[tuple[list[str], list[int]]] = []
        self.observed: list[str] = []
        self.released: list[str] = []

    def propose(self, sequences, limits):
        self.asked.append(([sequence.sequence_id for sequence in sequences], list(limits)))
        lengths = [min(limit, self.num_tokens) for limit in limits]
        return [Draft(list(range(1000, 1000 + n)), source="draft") if n else Draft() for n in lengths]

    def observe(self, sequence, draft, verdict):
        self.observed.append(sequence.sequence_id)

    def release(self, sequence):
        self.released.append(sequence.sequence_id)


def make_hybrid(draft_seconds: float = 0.004, num_model_tokens: int = 99):
    model = ModelStandIn(num_model_tokens)
    return HybridDrafter(SuffixDrafter(0, 2), model, CostTable(FLAT, draft_seconds)), model


def make_sequence(tokens, request_id="r") -> Sequence:
    return Sequence(Request(request_id, tuple(tokens), SamplingParams()))


LOOPING = list(range(20)) * 2  # a match of 20 tokens
FRESH = list(range(50))


class TestChoice:
    def test_long_matches_go_to_the_suffix_and_the_rest_to_the_model(self):
        hybrid, model = make_hybrid()
        sequences = [make_sequence(LOOPING, "a"), make_sequence(FRESH, "b"), make_sequence(LOOPING, "c")]
        drafts = hybrid.propose(sequences, [4, 5, 0])
        assert [draft.source for draft in drafts] == ["suffix", "draft", "none"]
        assert [len(draft) for draft in drafts] == [4, 5, 0]
        assert model.asked == [(["b/0"], [5])]

    def test_a_slow_model_makes_short_matches_worth_while(self):
        short_match = [7, 8, 1, 2, 3, 4, 5, 6, 7, 8]
        for draft_seconds, source in [(0.0001, "draft"), (0.03, "suffix")]:
            hybrid, _ = make_hybrid(draft_seconds)
            assert hybrid.propose([make_sequence(short_match)], [6])[0].source == source

    def test_a_match_stands_in_where_the_model_has_no_room(self):
        hybrid, _ = make_hybrid(0.0001, num_model_tokens=0)
        assert hybrid.propose([make_sequence([7, 8, 1, 2, 3, 4, 7, 8])], [3])[0].source == "suffix"


class TestLearning:
    def test_matches_that_fail_lose_to_the_model_and_win_again_when_they_come_true(self):
        hybrid, _ = make_hybrid()
        sequence = make_sequence(LOOPING)  # the suffix proposes 0, 1, 2, 3 throughout
        sources = []
        for came_true in [False] * 30 + [True] * 60:
            [draft] = hybrid.propose([sequence], [4])
            sources.append(draft.source)
            if came_true:
                verdict = Verdict(4 if draft.source == "suffix" else 0, [0, 1, 2, 3, 4])
            else:
                verdict = Verdict(0, [999]) if draft.source == "suffix" else Verdict(2, [1000, 1001, 999])
            hybrid.observe(sequence, draft, verdict)
        assert sources[0] == "suffix"
        assert sources[29] == "draft"
        assert sources[-1] == "suffix"  # judged all along, although not chosen

    def test_a_model_that_fails_is_passed_over_and_later_tried_again(self):
        hybrid, _ = make_hybrid(0.0001)
        sequence = make_sequence([7, 8, 1, 2, 3, 4, 5, 6, 7, 8])
        sources = []
        for _ in range(400):
            [draft] = hybrid.propose([sequence], [4])
            sources.append(draft.source)
            # The target goes on as the suffix says for two tokens: never what the model says.
            verdict = Verdict(2 if draft.source == "suffix" else 0, [1, 2, 99])
            hybrid.observe(sequence, draft, verdict)
        assert sources[0] == "draft"
        first_suffix = sources.index("suffix")
        assert "draft" in sources[first_suffix:]
        assert sources.count("draft") < 100

    def test_observe_and_release_reach_both(self):
        hybrid, model = make_hybrid()
        sequence = make_sequence(LOOPING)
        [draft] = hybrid.propose([sequence], [4])
        hybrid.observe(sequence, draft, Verdict(0, [5]))
        hybrid.release(sequence)
        hybrid.release(sequence)
        assert (model.observed, model.released) == (["r/0"], ["r/0", "r/0"])
        assert hybrid._offers == {}


class TestAcceptanceRate:
    def test_starts_at_the_prior_and_approaches_the_truth(self):
        rate = AcceptanceRate(0.8)
        assert rate.value == 0.8
        for _ in range(100):
            rate.update(1, 4)  # one accepted, one rejected, two not judged
        assert rate.value == pytest.approx(0.5, abs=0.03)

    def test_forgets(self):
        rate = AcceptanceRate(0.5)
        for _ in range(1000):
            rate.update(0, 1)
        for _ in range(100):
            rate.update(8, 8)
        assert rate.value > 0.9

    @pytest.mark.parametrize(("accepted", "drafted"), [(0, 1), (3, 3), (15, 15), (500, 500)])
    def test_is_a_probability(self, accepted, drafted):
        rate = AcceptanceRate(0.9)
        for _ in range(50):
            rate.update(accepted, drafted)
            assert 0.0 <= rate.value <= 1.0
