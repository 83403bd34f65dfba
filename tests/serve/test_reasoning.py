"""Thoughts split from answers, in any pieces, without a part of a tag being shown."""

from __future__ import annotations

import pytest

from paceline.serve.reasoning import ReasoningSplitter, starts_in_thought


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize(
    ("in_thought", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm, a < b.\n\nSo.\n</think>\n\nYes.\n", "Hm, a < b.\n\nSo.", "Yes.\n"),
        (False, "\n <think></think>Yes", "", "Yes"),
        (False, "Plain <think>text</think>", "", "Plain <think>text</think>"),
        (False, "<thin", "", "<thin"),
        (False, "<thing>", "", "<thing>"),
        (False, "<think>cut off </thi", "cut off </thi", ""),
        (False, "<think>cut off \n", "cut off", ""),
        (True, "Hm.</think>Yes.</think>", "Hm.", "Yes.</think>"),
        (False, "", "", ""),
    ],
)
def test_split(in_thought, text, reasoning, content, size):
    splitter = ReasoningSplitter(in_thought)
    deltas = [splitter.feed(text[i : i + size]) for i in range(0, len(text), size)] + [splitter.finish()]
    assert "".join(delta.reasoning for delta in deltas) == reasoning
    assert "".join(delta.content for delta in deltas) == content


def test_text_is_not_held_longer_than_it_must():
    splitter = ReasoningSplitter()
    assert splitter.feed("<think>Hm").reasoning == "Hm"
    assert splitter.feed(" <").reasoning == ""
    assert splitter.feed("b").reasoning == " <b"
    assert splitter.feed("</think>A").content == "A"
    assert splitter.feed(" b ").content == " b "


def test_a_prompt_may_open_the_thought():
    assert starts_in_thought("<|im_start|>assistant\n<think>\n")
    assert not starts_in_thought("<think>\n\n</think>\n\n")
    assert not starts_in_thought("hello")
