"""What a grammar does to drafts: forced ones offered, others cut, sampled ones left whole."""

from __future__ import annotations

import pytest
import torch

from fake_engine import EOS, TOKENIZER, VOCAB_SIZE
from paceline.runtime.drafting.drafter import Draft
from paceline.runtime.drafting.grammar import forced_draft, permitted_draft
from paceline.runtime.grammar import Grammars, GrammarSpec
from paceline.runtime.sequence import Request, Sequence

GRAMMARS = Grammars(TOKENIZER, VOCAB_SIZE, [EOS])


def sequence(regex: str | None) -> Sequence:
    made = Sequence(Request("r", (1,)))
    made.grammar = None if regex is None else GRAMMARS.matcher(GrammarSpec("regex", regex))
    return made


@pytest.mark.parametrize(
    ("regex", "limit", "forced"),
    [("abc[de]", 9, b"abc"), ("abc[de]", 2, b"ab"), ("abc", 0, b""), ("[ab]c", 9, b""), (None, 9, b"")],
)
def test_forced(regex, limit, forced):
    draft = forced_draft(sequence(regex), limit)
    assert bytes(draft.token_ids) == forced
    assert draft.source == ("forced" if forced else "none")


@pytest.mark.parametrize(("regex", "drafted", "kept"), [("ab*", b"abcb", 2), ("ab*", b"b", 0), (None, b"abcb", 4)])
def test_one_hot_drafts_are_cut_where_refused(regex, drafted, kept):
    draft = permitted_draft(sequence(regex), Draft(list(drafted), source="suffix"))
    assert (draft.token_ids, draft.source) == (list(drafted[:kept]), "suffix")


def test_sampled_drafts_are_left_whole():
    """To cut one by what was drawn would change what the target draws from after a rejection."""
    draft = Draft(list(b"ax"), torch.full((2, VOCAB_SIZE), 1 / VOCAB_SIZE), "draft")
    assert permitted_draft(sequence("ab*"), draft) is draft
