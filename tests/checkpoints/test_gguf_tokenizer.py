from __future__ import annotations

import itertools
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoints.gguf_tokenizer import read_text_settings
from paceline.errors import CheckpointError
from tiny_checkpoints import tiny_tokenizer
from tiny_gguf import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

PIECES = [
    "▁",
    "▁t",
    "he",
    "▁the",
    "in",
    "▁in",
    "ing",
    "th",
    "ther",
    "er",
    "▁a",
    "an",
    "and",
    "▁and",
    "oo",
    "foo",
    "▁▁",
    "es",
]


def sentencepiece_metadata(**changes):
    """A vocabulary in the manner of Llama 2: three specials, all bytes, pieces by falling score, single characters."""
    singles = list(string.ascii_lowercase)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *singles]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(PIECES) + len(singles))]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(PIECES) + len(singles))]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def bpe_metadata(pre="gpt-2", **changes):
    tokens = sorted(tiny_tokenizer().get_vocab(), key=tiny_tokenizer().get_vocab().get)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["Ġ t", "h e"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **changes,
    }


def sentencepiece_reference(text: str, metadata: dict) -> list[int]:
    """llm_tokenizer_spm of llama.cpp, spelled out: merge the adjacent pair that scores best, leftmost first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    symbols = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        candidates = [
            (-metadata["tokenizer.ggml.scores"][ids[left + right]], position)
            for position, (left, right) in enumerate(itertools.pairwise(symbols))
            if left + right in ids
        ]
        if not candidates:
            break
        position = min(candidates)[1]
        symbols[position : position + 2] = [symbols[position] + symbols[position + 1]]
    found = [[ids[s]] if s in ids else [ids[f"<0x{byte:02X}>"] for byte in s.encode()] for s in symbols]
    return [token for piece in found for token in piece]


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abdefghinorst  é☃🙂\n", max_size=40))
def test_sentencepiece_splits_as_llama_cpp_does(text):
    metadata = sentencepiece_metadata()
    tokenizer = read_text_settings(metadata).tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == sentencepiece_reference(text, metadata)
    assert tokenizer.decode(ids) == text


def test_sentencepiece_begins_with_bos_and_metadata_can_say_no():
    assert read_text_settings(sentencepiece_metadata()).tokenizer.encode("the").ids[0] == 1
    without = read_text_settings(sentencepiece_metadata(**{"tokenizer.ggml.add_bos_token": False}))
    assert without.tokenizer.encode("the").tokens == ["▁the"]
    assert without.bos_token_id == 1


def test_gemma_merges_in_token_order_and_spells_spaces_anew():
    metadata = sentencepiece_metadata(
        **{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    )
    metadata["general.architecture"] = "gemma3"
    metadata["tokenizer.ggml.scores"] = list(reversed(metadata["tokenizer.ggml.scores"]))
    metadata["tokenizer.ggml.tokens"] = [
        "  " if token == "▁▁" else token for token in metadata["tokenizer.ggml.tokens"]
    ]
    tokenizer = read_text_settings(metadata).tokenizer
    assert tokenizer.encode("the  ther").tokens == ["t", "he", "▁", "▁the", "r"]
    assert tokenizer.encode("a  a").tokens == ["a", "▁", "▁a"]
    assert tokenizer.encode("a  b").tokens == ["a", "▁▁", "b"]
    assert tokenizer.decode(tokenizer.encode(" the  ther").ids) == " the  ther"


def test_special_and_user_defined_tokens_are_found_whole_and_padding_is_dropped():
    metadata = bpe_metadata()
    for token, kind in (("<tool_call>", USER_DEFINED), ("[PAD385]", UNUSED), ("[PAD386]", UNUSED)):
        metadata["tokenizer.ggml.tokens"].append(token)
        metadata["tokenizer.ggml.token_type"].append(kind)
    tokenizer = read_text_settings(metadata).tokenizer
    ids = tokenizer.encode("a<tool_call>b<|im_end|>").ids
    assert [i for i in ids if i in (384, 2)] == [384, 2] and len(ids) == 4
    assert tokenizer.decode(ids) == "a<tool_call>b"  # user-defined tokens are text, special ones are not
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<tool_call>b<|im_end|>"
    assert tokenizer.token_to_id("[PAD385]") is None and tokenizer.get_vocab_size() == 385


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", "It 's Ġ2024 , ĠHELLO Ġ Ġworld ' LL Ċ Ċ x"),
        ("smollm", "It 's Ġ 2 0 2 4 , ĠHELLO Ġ Ġworld ' LL Ċ Ċ x"),
        ("qwen2", "It 's Ġ 2 0 2 4 , ĠHELLO Ġ Ġworld 'LL ĊĊ x"),
        ("llama-bpe", "It 's Ġ 202 4 , ĠHELLO Ġ Ġworld 'LL ĊĊ x"),
        ("tekken", "It 's Ġ 2 0 2 4 , ĠHELLO Ġ Ġworld 'LL ĊĊ x"),
        ("default", "It ' s Ġ 202 4 , ĠHELLO Ġ Ġworld ' LL Ċ Ċ x"),
        ("falcon", "It ' s Ġ 202 4 , ĠHELLO Ġ Ġworld ' LL Ċ Ċ x"),
    ],
)
def test_pre_tokenizers_split_where_llama_cpp_does(pre, words):
    tokenizer = read_text_settings(bpe_metadata(pre)).tokenizer
    split = tokenizer.pre_tokenizer.pre_tokenize_str("It's 2024, HELLO  world'LL\n\nx")
    assert [word for word, _ in split] == words.split()


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40), st.sampled_from(["gpt-2", "smollm", "llama-bpe", "tekken", "default", "deepseek-coder"]))
def test_byte_level_text_round_trips(text, pre):
    tokenizer = read_text_settings(bpe_metadata(pre, **{"tokenizer.ggml.add_bos_token": False})).tokenizer
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_only_some_byte_level_kinds_begin_with_bos():
    assert read_text_settings(bpe_metadata("llama-bpe")).tokenizer.encode("x").ids[0] == 1
    assert read_text_settings(bpe_metadata("gpt-2")).tokenizer.encode("x").ids[0] != 1


def test_every_token_that_ends_a_turn_stops():
    metadata = bpe_metadata(**{"tokenizer.ggml.eot_token_id": 5})
    assert read_text_settings(metadata).eos_token_ids == {0, 2, 5}  # <|endoftext|> is 0, the metadata's eos 2


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (bpe_metadata("qwen99"), r"`tokenizer\.ggml\.pre` is 'qwen99', which is not supported"),
        (bpe_metadata(None), r"`tokenizer\.ggml\.pre` "),
        (bpe_metadata(**{"tokenizer.ggml.model": "bert"}), "'bert' is not supported"),
        (bpe_metadata(**{"tokenizer.ggml.merges": ["zz zz"]}), "do not fit the vocabulary"),
        (bpe_metadata(**{"tokenizer.ggml.merges": ["zz"]}), "not a pair"),
        (bpe_metadata(**{"tokenizer.ggml.token_type": [1]}), "does not match"),
        (bpe_metadata(**{"tokenizer.ggml.eos_token_id": 10**6}), "outside the vocabulary of 384 tokens"),
        (bpe_metadata(**{"tokenizer.ggml.tokens": None}), r"`tokenizer\.ggml\.tokens` is missing"),
        (bpe_metadata(**{"tokenizer.chat_template": 3}), r"`tokenizer\.chat_template` is 3"),
        (sentencepiece_metadata(**{"tokenizer.ggml.scores": [0.0]}), r"`tokenizer\.ggml\.scores` does not match"),
    ],
)
def test_what_cannot_be_reproduced_is_refused_by_key(metadata, message):
    with pytest.raises(CheckpointError, match=message):
        read_text_settings(metadata)
