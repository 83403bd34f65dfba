from __future__ import annotations

import re

import pytest
import tokenizers
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from paceline.runtime.detokenize import IncrementalDetokenizer, StopStrings

SPECIALS = ["<s>", "</s>"]
WORDS = ["def", " def", "  ", "\n", " the", "ing", "é", " 日本", "🙂", "\u200d", "�"]


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Qwen and Llama 3: tokens are byte strings, spelt in a printable alphabet."""
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = alphabet + [spell.pre_tokenize_str(word)[0][0] for word in WORDS if len(word.encode()) > 1]
    tokenizer = tokenizers.Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2, Mistral and Gemma: words with ▁ for space, bytes for the rest, the text's first space stripped."""
    pieces = SPECIALS + [f"<0x{byte:02X}>" for byte in range(256)] + [w.replace(" ", "▁") for w in WORDS] + ["▁"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<s>"))
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}
KINDS = pytest.mark.parametrize("kind", TOKENIZERS)


def bytes_to_ids(kind: str, data: bytes) -> list[int]:
    tokenizer = TOKENIZERS[kind]
    if kind == "byte_fallback":
        return [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in data]
    # the alphabet of byte-level tokenizers: printable bytes stand for themselves, others for 256, 257, ...
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [tokenizer.token_to_id(spelling[byte]) for byte in data]


def stream(kind: str, token_ids: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    detokenizer = IncrementalDetokenizer(TOKENIZERS[kind], prompt)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


class TestDetokenizer:
    @KINDS
    @given(data=st.data())
    @settings(max_examples=300, deadline=None)
    def test_valid_text_cut_into_bytes_and_words_comes_out_whole_and_in_characters(self, kind, data):
        parts = data.draw(st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=12))
        tokenizer, token_ids = TOKENIZERS[kind], []
        for part in parts:
            known = tokenizer.token_to_id(part.replace(" ", "▁")) if kind == "byte_fallback" else None
            token_ids += bytes_to_ids(kind, part.encode()) if known is None or data.draw(st.booleans()) else [known]
        deltas = stream(kind, token_ids)
        assert "".join(deltas) == tokenizer.decode(token_ids)
        written = "".join(deltas[:-1])
        assert written.count("�") <= sum(part.count("�") for part in parts), "a character was split"

    @KINDS
    @given(data=st.data())
    @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
    def test_any_token_ids_give_the_text_of_all_at_once(self, kind, data):
        size = TOKENIZERS[kind].get_vocab_size()
        # Heads and tails of characters are likelier than chance, runs of them too.
        pieces = st.sampled_from([b"\xf0\x9f", b"\x99\x82", b"\xe6", b"\x97\xa5", b"\xff", b"\xc3", b"a", b" "])
        chunk = st.integers(0, size - 1).map(lambda i: [i]) | pieces.map(lambda b: bytes_to_ids(kind, b))
        token_ids = [i for ids in data.draw(st.lists(chunk, max_size=40)) for i in ids]
        text = TOKENIZERS[kind].decode(token_ids)
        # Byte fallback takes a whole run of bytes back if the last is no text: then no streaming can agree with it.
        assume(kind == "byte_level" or "�" not in text)
        assert "".join(stream(kind, token_ids)) == text

    @KINDS
    @pytest.mark.parametrize("text", ["🙂", "日", "é", "🙂🙂", "a🙂b", "👩‍🚀"])
    def test_a_character_comes_with_its_last_byte(self, kind, text):
        deltas = stream(kind, bytes_to_ids(kind, text.encode()))
        expected = []
        for character in text:
            expected += [""] * (len(character.encode()) - 1) + [character]
        assert deltas == [*expected, ""]

    @KINDS
    def test_an_unfinished_character_is_shown_at_the_end_only(self, kind):
        token_ids = bytes_to_ids(kind, b"ab\xf0\x9f\x99")
        *early, last = stream(kind, token_ids)
        assert "".join(early) == "ab"
        assert set(last) == {"�"}

    @KINDS
    def test_special_tokens_have_no_text(self, kind):
        tokenizer = TOKENIZERS[kind]
        start, end = (tokenizer.token_to_id(token) for token in SPECIALS)
        a, b = bytes_to_ids(kind, b"ab")
        assert stream(kind, [start, a, end, start, b, end]) == ["", "a", "", "", "b", "", ""]

    @KINDS
    @pytest.mark.parametrize("data", [b"\xff", b"\xf0\x9f\x99", b"\x80"])
    def test_endless_bytes_that_are_no_text_do_not_pile_up(self, kind, data):
        token_ids = bytes_to_ids(kind, data * 200)
        detokenizer = IncrementalDetokenizer(TOKENIZERS[kind], ())
        text, longest_silence, silence = "", 0, 0
        for token_id in token_ids:
            delta = detokenizer.push(token_id)
            silence = 0 if delta else silence + 1
            longest_silence = max(longest_silence, silence)
            text += delta
        assert longest_silence < 40
        assert text + detokenizer.flush() == TOKENIZERS[kind].decode(token_ids)

    def test_the_space_before_the_first_word_is_kept_after_a_prompt(self):
        tokenizer = TOKENIZERS["byte_fallback"]
        the, prompt = tokenizer.token_to_id("▁the"), tuple(bytes_to_ids("byte_fallback", b"in"))
        assert "".join(stream("byte_fallback", [the, the], prompt)) == " the the"
        assert "".join(stream("byte_fallback", [the, the])) == "the the"

    def test_work_per_token_does_not_grow_with_the_output(self):
        class Counting:
            longest = 0

            def decode(self, token_ids, skip_special_tokens):
                self.longest = max(self.longest, len(token_ids))
                return TOKENIZERS["byte_level"].decode(token_ids, skip_special_tokens=skip_special_tokens)

        tokenizer = Counting()
        detokenizer = IncrementalDetokenizer(tokenizer, tuple(bytes_to_ids("byte_level", b"x" * 500)))
        for token_id in bytes_to_ids("byte_level", "ab🙂日".encode() * 100):
            detokenizer.push(token_id)
        assert tokenizer.longest < 50


def first_completed(text: str, stops: list[str]) -> tuple[int, int] | None:
    """The (start, end) of the match completed first, the longest of those: by looking at everything."""
    found = [(m.start() + len(s), m.start()) for s in stops for m in re.finditer(f"(?={re.escape(s)})", text)]
    return None if not found else (min(found)[1], min(found)[0])


class TestStopStrings:
    @given(
        pieces=st.lists(st.text("ab", max_size=4), max_size=10),
        stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
        include=st.booleans(),
    )
    @example(pieces=["a", "a", "b"], stops=["aab", "ab"], include=False)
    @example(pieces=["abab", "abc"], stops=["ababc"], include=False)
    @settings(max_examples=500, deadline=None)
    def test_any_cut_gives_what_the_whole_text_gives(self, pieces, stops, include):
        matcher, shown, stopped = StopStrings(stops, include), "", False
        text = "".join(pieces)
        match = first_completed(text, stops)
        consumed = ""
        for piece in pieces:
            new, stopped = matcher.push(piece)
            shown += new
            consumed += piece
            if stopped:
                break
            assert consumed.startswith(shown)
            held = consumed[len(shown) :]
            assert any(stop.startswith(held) for stop in stops) or not held, "text is held back for no reason"
        assert stopped == (match is not None)
        if match is None:
            assert shown + matcher.flush() == text
        else:
            assert match[1] <= len(consumed) < match[1] + max(1, len(piece)), "seen with the piece that completed it"
            assert shown == text[: match[1] if include else match[0]]
            assert matcher.flush() == ""

    def test_nothing_is_held_without_stop_strings(self):
        assert StopStrings((), False).push("abc") == ("abc", False)

    def test_a_match_that_may_not_stop_is_shown(self):
        matcher = StopStrings(("ab",), False)
        assert matcher.push("xab", may_stop=False) == ("xab", False)
        assert matcher.push("ab") == ("", True)

    def test_a_match_begun_before_it_may_stop_counts_if_completed_after(self):
        matcher = StopStrings(("abc",), False)
        assert matcher.push("xab", may_stop=False) == ("x", False)
        assert matcher.push("c") == ("", True)

    def test_a_match_may_overlap_one_that_could_not_stop(self):
        matcher = StopStrings(("aba",), False)
        assert matcher.push("aba", may_stop=False) == ("ab", False)
        assert matcher.push("ba") == ("", True)

    def test_a_long_stop_string_over_a_hostile_text_is_linear(self):
        compared = 0

        class Text(str):
            def __getitem__(self, index):
                nonlocal compared
                compared += 1
                return str.__getitem__(self, index)

        stop = Text("a" * 200 + "b")
        matcher = StopStrings((stop,), False)
        compared = 0
        for _ in range(2000):
            matcher.push("a")
        assert compared < 10 * 2000
