from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.runtime.drafting.drafter import Draft
from paceline.runtime.drafting.suffix import MAX_CANDIDATES, MAX_MATCH, MatchIndex, SuffixDrafter
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.sequence import FinishReason, Request, Sequence
from paceline.runtime.verify import Verdict


def make_sequence(request_id: str, prompt, output=()) -> Sequence:
    sequence = Sequence(Request(request_id, tuple(prompt), SamplingParams()))
    sequence.token_ids.extend(output)
    return sequence


def finish(drafter: SuffixDrafter, sequence: Sequence) -> None:
    drafter.propose([sequence], [1])
    sequence.finish_reason = FinishReason.STOP
    drafter.release(sequence)


def brute_force(tokens: list[int], context: list[int], min_match: int) -> tuple[int, int] | None:
    """(length, end) of the longest, then most recent, earlier occurrence of a suffix of `context` in `tokens`."""
    best = None
    for end in range(len(tokens)):
        length = 0
        while length < min(len(context), end, MAX_MATCH) and tokens[end - length - 1] == context[-length - 1]:
            length += 1
        if length >= min_match and (best is None or length >= best[0]):
            best = (length, end)
    return best


class TestMatchIndex:
    @given(
        st.lists(st.integers(0, 2), max_size=MAX_CANDIDATES),  # so short that no candidate is left out
        st.integers(1, 4),
        st.integers(1, 7),
    )
    @settings(deadline=None, max_examples=300)
    def test_finds_what_brute_force_finds_while_growing(self, text, min_match, step):
        tokens: list[int] = []
        index = MatchIndex(tokens, min_match)
        for start in range(0, len(text), step):
            tokens.extend(text[start : start + step])
            found = index.longest_match(tokens)
            assert (found and (found.length, found.end)) == brute_force(tokens, tokens, min_match)

    @given(
        st.lists(st.integers(0, 2), max_size=MAX_CANDIDATES),
        st.lists(st.integers(0, 3), max_size=40),
        st.integers(1, 4),
    )
    @settings(deadline=None, max_examples=300)
    def test_finds_what_brute_force_finds_in_another_text(self, tokens, context, min_match):
        found = MatchIndex(tokens, min_match).longest_match(context)
        assert (found and (found.length, found.end)) == brute_force(tokens, context, min_match)

    def test_ids_beyond_the_key_width_are_told_apart(self):
        tokens = [1 << 20, 5, 7, 0, 5, 8, 1 << 20, 5]
        match = MatchIndex(tokens, 2).longest_match(tokens)
        assert (match.length, tokens[match.end]) == (2, 7)

    def test_repetitive_text_is_indexed_without_looking_back(self):
        tokens = [7] * 5000
        match = MatchIndex(tokens, 2).longest_match(tokens)
        assert (match.length, match.end) == (MAX_MATCH, 4999)


class TestPropose:
    def test_continues_the_match(self):
        sequence = make_sequence("a", [1, 2, 3, 4, 5, 6, 9, 1, 2, 3])
        assert SuffixDrafter(0, 2).propose([sequence], [3]) == [Draft([4, 5, 6], None, "suffix")]

    def test_prefers_the_longer_then_the_more_recent(self):
        longer_first = make_sequence("a", [8, 1, 2, 50, 1, 2, 60, 8, 1, 2])
        equally_long = make_sequence("b", [1, 2, 50, 1, 2, 60, 7, 1, 2])
        drafts = SuffixDrafter(0, 1).propose([longer_first, equally_long], [1, 1])
        assert [draft.token_ids for draft in drafts] == [[50], [60]]

    @pytest.mark.parametrize("period", [1, 2, 3])
    def test_periodic_text_is_drafted_to_the_limit(self, period):
        sequence = make_sequence("a", [10 + i % period for i in range(12)])
        [draft] = SuffixDrafter(0, 2).propose([sequence], [15])
        assert draft.token_ids == [10 + (12 + i) % period for i in range(15)]

    def test_never_more_than_the_limit_and_nothing_without_a_match(self):
        drafter = SuffixDrafter(0, 2)
        looping = [make_sequence(str(i), [1, 2, 3, 1, 2]) for i in range(4)]
        fresh = make_sequence("fresh", [1, 2, 3, 4, 5])
        drafts = drafter.propose([*looping, fresh], [0, 1, 2, 9, 9])
        assert [len(draft) for draft in drafts] == [0, 1, 2, 9, 0]
        assert drafts[0] == drafts[4] == Draft()

    def test_follows_the_output_token_by_token(self):
        drafter = SuffixDrafter(0, 2)
        sequence = make_sequence("a", [5, 6, 7, 8])
        seen = []
        for token_id in [5, 6, 7, 1]:
            sequence.token_ids.append(token_id)
            [draft] = drafter.propose([sequence], [1])
            drafter.observe(sequence, draft, Verdict(0, [token_id]))
            seen.append(draft.token_ids)
        assert seen == [[], [7], [8], []]

    def test_is_deterministic(self):
        text = [(i * i) % 7 for i in range(200)]
        sequences = [make_sequence("a", text), make_sequence("b", text)]
        drafts = SuffixDrafter(1000, 2).propose(sequences, [8, 8])
        assert drafts[0] == drafts[1] == SuffixDrafter(1000, 2).propose(sequences[:1], [8])[0]

    def test_min_match_out_of_range_is_refused(self):
        for arguments in [(10, 0), (10, MAX_MATCH + 1), (-1, 2)]:
            with pytest.raises(ValueError, match=r"min_match|max_corpus_tokens"):
                SuffixDrafter(*arguments)


class TestCorpus:
    def test_past_outputs_are_found(self):
        drafter = SuffixDrafter(1000, 2)
        finish(drafter, make_sequence("old", [1, 2], [30, 31, 32, 33]))
        assert drafter.propose([make_sequence("new", [9, 9, 8, 30, 31])], [5])[0].token_ids == [32, 33]

    def test_the_same_prompt_finds_its_first_tokens(self):
        drafter = SuffixDrafter(1000, 2)
        prompt = list(range(100, 200))
        finish(drafter, make_sequence("old", prompt, [30, 31, 32]))
        assert drafter.propose([make_sequence("new", prompt)], [5])[0].token_ids == [30, 31, 32]

    def test_own_text_wins_over_equally_long_matches_and_loses_to_longer_ones(self):
        drafter = SuffixDrafter(1000, 2)
        finish(drafter, make_sequence("old", [0], [3, 4, 5, 77]))
        assert drafter.propose([make_sequence("a", [4, 5, 88, 4, 5])], [1])[0].token_ids == [88]
        assert drafter.propose([make_sequence("b", [4, 5, 88, 3, 4, 5])], [1])[0].token_ids == [77]

    def test_a_draft_never_crosses_from_one_output_to_the_next(self):
        drafter = SuffixDrafter(1000, 2)
        for i in range(3):
            finish(drafter, make_sequence(str(i), [1], [50, 51, 60 + i]))
        assert drafter.propose([make_sequence("a", [50, 51])], [9])[0].token_ids == [62]
        assert drafter.propose([make_sequence("b", [51, 62])], [9]) == [Draft()]
        assert drafter.propose([make_sequence("c", [62, 1])], [9]) == [Draft()]

    @given(st.lists(st.integers(1, 60), max_size=30), st.integers(0, 100))
    @settings(deadline=None)
    def test_memory_is_bounded_and_the_latest_is_kept(self, lengths, max_corpus_tokens):
        drafter = SuffixDrafter(max_corpus_tokens, 2)
        for i, length in enumerate(lengths):
            finish(drafter, make_sequence(str(i), [1], [1000 * i + j for j in range(length)]))
            assert drafter.num_corpus_tokens <= max_corpus_tokens
            if 3 <= length < max_corpus_tokens // 2 - 1:
                context = make_sequence("q", [1000 * i, 1000 * i + 1])
                assert drafter.propose([context], [1])[0].token_ids == [1000 * i + 2]
                drafter.release(context)

    def test_old_outputs_are_evicted(self):
        drafter = SuffixDrafter(100, 2)
        for i in range(20):
            finish(drafter, make_sequence(str(i), [1], [1000 * i + j for j in range(10)]))
        assert drafter.propose([make_sequence("q", [0, 1])], [1]) == [Draft()]

    def test_opting_out_keeps_nothing(self):
        drafter = SuffixDrafter(0, 2)
        finish(drafter, make_sequence("old", [1, 2], [30, 31, 32, 33]))
        assert drafter.num_corpus_tokens == 0

    def test_preempted_and_undrafted_sequences_leave_nothing_and_release_is_idempotent(self):
        drafter = SuffixDrafter(1000, 2)
        preempted = make_sequence("a", [1, 2], [30, 31])
        drafter.propose([preempted], [1])
        drafter.release(preempted)
        undrafted = make_sequence("b", [1, 2], [30, 31])
        undrafted.finish_reason = FinishReason.STOP
        drafter.release(undrafted)
        assert drafter.num_corpus_tokens == 0
        finish(drafter, preempted)
        once = drafter.num_corpus_tokens
        drafter.release(preempted)
        assert drafter.num_corpus_tokens == once == 2 + 2 + 1

    def test_a_reused_request_id_starts_afresh(self):
        drafter = SuffixDrafter(0, 2)
        drafter.propose([make_sequence("a", [1, 2, 3, 1, 2])], [1])
        assert drafter.propose([make_sequence("a", [1, 2, 4, 1, 2])], [1])[0].token_ids == [4]


def salted(request_id: str, salt: str | None, prompt, output=()) -> Sequence:
    sequence = Sequence(Request(request_id, tuple(prompt), SamplingParams(), cache_salt=salt))
    sequence.token_ids.extend(output)
    return sequence


def test_tenants_do_not_see_each_others_outputs():
    drafter = SuffixDrafter(1000, 2)
    finish(drafter, salted("a", "one", [1, 2], [3, 4, 5, 6]))
    for salt, drafted in (("one", [5, 6]), ("two", []), (None, [])):
        draft, _ = drafter.lookup(salted(f"b{salt}", salt, [7, 3, 4]), 2)
        assert draft.token_ids == drafted
    finish(drafter, salted("c", None, [1, 2], [3, 4, 8, 9]))
    assert drafter.lookup(salted("d", None, [7, 3, 4]), 2)[0].token_ids == [8, 9]
    assert drafter.lookup(salted("e", "one", [7, 3, 4]), 2)[0].token_ids == [5, 6]


def test_the_bound_holds_over_all_tenants_together():
    drafter = SuffixDrafter(100, 2)
    for number in range(60):
        finish(drafter, salted(f"r{number}", f"tenant {number % 12}", [1, 2], range(10, 10 + number % 40 + 1)))
        assert 0 < drafter.num_corpus_tokens <= 100
