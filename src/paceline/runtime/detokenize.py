"""From token ids to text as they come, one at a time. Knows tokenizers and stop strings, nothing of sequences."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import tokenizers

_MAX_PENDING = 16  # tokens waiting for a character to be completed; no real character needs more than 4
_CONTEXT = 6  # prompt tokens decoded along with the first output, as some decoders strip the space of a first token


class IncrementalDetokenizer:
    """Text deltas whose concatenation is what decoding everything at once gives; no delta splits a character.

    Special tokens have no text, unless `skip_special_tokens` is False. `prompt_token_ids` are context only: their text
    is not returned. Each push decodes a bounded window, from the last emitted token on: decoding the window with and
    without the new tokens and taking the difference gives the text they add in context (as vLLM and
    text-generation-inference do it). A window that ends in U+FFFD may be in the middle of a character and waits for
    more.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        prompt_token_ids: SequenceOf[int] = (),
        skip_special_tokens: bool = True,
    ):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_token_ids[-_CONTEXT:])  # emitted tokens that serve as context, then pending ones
        self._emitted_text = self._decode(self._window)
        if self._emitted_text.endswith("\ufffd"):  # the prompt ends within a character: the output stands alone
            self._window, self._emitted_text = [], ""
        self._num_emitted = len(self._window)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes, often none."""
        self._window.append(token_id)
        text = self._decode(self._window)
        if len(text) > len(self._emitted_text) and not text.endswith("\ufffd"):
            return self._emit(len(self._window), text)
        if len(self._window) - self._num_emitted > _MAX_PENDING:
            return self._emit_some(text)
        return ""

    def flush(self) -> str:
        """The text of what is still pending, incomplete characters as U+FFFD. Nothing can be pushed meaningfully
        after it."""
        return self._emit(len(self._window), self._decode(self._window))

    def _emit(self, end: int, text: str) -> str:
        """Return what `text`, that of the window's first `end` tokens, adds; keep its last tokens as context."""
        delta = text[len(self._emitted_text) :]
        del self._window[: self._num_emitted]
        self._num_emitted = end - self._num_emitted
        self._emitted_text = self._decode(self._window[: self._num_emitted])
        return delta

    def _emit_some(self, text: str) -> str:
        """Too much is pending (bytes that are no text, or tokens without any): emit up to a place between characters.

        A place is between characters if decoding both sides apart changes nothing. One is found within the length of
        the longest character before the last one that may be incomplete.
        """
        for end in range(len(self._window) - 4, len(self._window) - 9, -1):
            head = self._decode(self._window[:end])
            if head + self._decode(self._window[end:]) == text:
                return self._emit(end, head)
        return self._emit(len(self._window), text)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class StopStrings:
    """Looks for stop strings in text that comes in pieces, holding back what may be the beginning of one.

    Knuth, Morris and Pratt's automaton, one per string: constant work per character (amortised) whatever the strings,
    and a result that does not depend on how the text was cut into pieces.
    """

    def __init__(self, stop: SequenceOf[str], include_in_output: bool):
        self._stop = tuple(stop)
        self._include_in_output = include_in_output
        self._borders = [_borders(text) for text in self._stop]
        self._num_matched = [0] * len(self._stop)  # how much of each string the text ends with
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """(text that can be shown, whether a stop string was completed).

        The match that is completed first counts, the longest of those; text is cut before it, or after it if it is to
        be included. `may_stop` False lets matches pass.
        """
        if not self._stop:
            return text, False
        text = self._held + text
        for end in range(len(self._held) + 1, len(text) + 1):
            longest = self._advance(text[end - 1])
            if longest and may_stop:
                self._held = ""
                return text[: end if self._include_in_output else end - longest], True
        num_shown = len(text) - max(self._num_matched)
        self._held = text[num_shown:]
        return text[:num_shown], False

    def flush(self) -> str:
        """What was held back, as no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Take one character: the length of the longest stop string that it completes, 0 if none."""
        longest = 0
        for index, (stop, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            matched = self._num_matched[index]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                longest = max(longest, matched)
                matched = borders[matched - 1]
            self._num_matched[index] = matched
        return longest


def _borders(text: str) -> list[int]:
    """For each beginning of `text`: the length of its longest proper end that is also a beginning of `text`."""
    borders = [0] * len(text)
    for end in range(1, len(text)):
        length = borders[end - 1]
        while length and text[length] != text[end]:
            length = borders[length - 1]
        borders[end] = length + (text[length] == text[end])
    return borders
