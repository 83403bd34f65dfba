"""Where an output ends is tested with the engine (test_engine.py); here is what one output is made of."""

from __future__ import annotations

import pytest
import torch

from fake_engine import EOS, TOKENIZER
from paceline.runtime.logprobs import TokenLogprobs, token_logprobs
from paceline.runtime.output import OutputStream, joined
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.sequence import FinishReason, Request, Sequence


def stream(**sampling):
    sequence = Sequence(Request("r", tuple(b"prompt"), SamplingParams(**{"max_tokens": 50} | sampling)))
    return sequence, OutputStream(sequence, TOKENIZER, [EOS])


def test_each_token_has_the_piece_of_text_that_it_completes():
    _, output_stream = stream(max_tokens=6)
    output = output_stream.extend([*"aé!".encode(), 0xF0, 0x9F], ["target"] * 6, None)
    assert output.pieces == ["a", "", "é", "!", "", "\ufffd"]  # what is incomplete comes at the end
    assert output.text == TOKENIZER.decode(output.token_ids)


def test_tokens_after_the_end_are_dropped_with_all_that_belongs_to_them():
    sequence, output_stream = stream()
    logprobs = [TokenLogprobs(token_id, -1.0, []) for token_id in (97, EOS, 98)]
    output = output_stream.extend([97, EOS, 98], ["draft", "draft", "target"], logprobs)
    assert output.token_ids == sequence.output_token_ids == [97, EOS]
    assert output.origins == sequence.origins == ["draft", "draft"]
    assert output.logprobs == logprobs[:2]
    assert (output.pieces, output.finish_reason) == (["a", ""], FinishReason.STOP)


def test_outputs_of_one_choice_join_to_one_and_stay_as_they_were():
    _, output_stream = stream(max_tokens=3)
    parts = [output_stream.extend([token_id], ["target"], []) for token_id in b"abc"]
    whole = joined(parts)
    assert (whole.text, whole.token_ids, whole.origins) == ("abc", list(b"abc"), ["target"] * 3)
    assert whole.finish_reason is FinishReason.LENGTH
    assert parts[0].token_ids == [97] and parts[0].finish_reason is None


def test_logprobs_are_those_of_each_row_with_as_many_alternatives_as_there_are():
    logits = torch.tensor([[0.0, 1.0, 2.0], [5.0, 0.0, 0.0]])
    first, second = token_logprobs(logits, [0, 0], 2)
    expected = torch.log_softmax(logits, dim=1)
    assert first.logprob == pytest.approx(float(expected[0, 0]))
    assert [token_id for token_id, _ in first.top] == [2, 1]
    assert second.top[0] == (0, pytest.approx(float(expected[1, 0])))
    assert [len(entry.top) for entry in token_logprobs(logits, [1, 2], 20)] == [3, 3]
    assert token_logprobs(logits, [1, 2], 0)[1].top == []
    assert [entry.rank for entry in token_logprobs(logits, [0, 1], 0)] == [3, 2]


def test_special_tokens_have_text_if_asked_for():
    for skip, text in ((True, "ab"), (False, "a<end>b")):
        sampling = SamplingParams(max_tokens=3, ignore_eos=True, skip_special_tokens=skip)
        sequence = Sequence(Request("r", (1,), sampling))
        assert OutputStream(sequence, TOKENIZER, [EOS]).extend([97, EOS, 98], ["target"] * 3, None).text == text


def test_a_prompt_that_ends_within_a_character_takes_no_text_from_the_output():
    sequence = Sequence(Request("r", tuple("a😀".encode()[:-1]), SamplingParams(max_tokens=3)))
    output = OutputStream(sequence, TOKENIZER, [EOS]).extend(["😀".encode()[-1], *b"bc"], ["target"] * 3, None)
    assert output.text == TOKENIZER.decode(output.token_ids) == "\ufffdbc"
