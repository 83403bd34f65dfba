"""From token ids to text as they come, one at a time. Knows tokenizers and stop strings, nothing of sequences."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import tokenizers

_MAX_PENDING = 16  # tokens waiting for a character to be completed; no real character needs more than 4
_CONTEXT = 6  # prompt tokens decoded along with the first output, as some decoders strip the space of a first token


class IncrementalDetokenizer:
    """Text deltas whose concatenation is what decoding everything at once gives; no delta splits a character.

    Special tokens have no text. `prompt_token_ids` are context only: their text is not returned. Each push decodes a
    bounded window, from the last emitted token on: decoding the window with and without the new tokens and taking the
    difference gives the text they add in context (as vLLM and text-generation-inference do it). A window that ends in
    U+FFFD may be in the middle of a character and waits for more.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, prompt_token_ids: SequenceOf[int] = ()):
        self._tokenizer = tokenizer
        self._window = list(prompt_token_ids[-_CONTEXT:])  # emitted tokens that serve as context, then pending ones
        self._num_emitted = len(self._window)
        self._emitted_text = self._decode(self._window) if self._window else ""

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
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class StopStrings:
    """Looks for stop strings in text that comes in pieces, holding back what may be the beginning of one."""

    def __init__(self, stop: SequenceOf[str], include_in_output: bool):
        self._stop = tuple(stop)
        self._include_in_output = include_in_output
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """(text that can be shown, whether a stop string was completed). The earliest match counts, the longest of
        those; text is cut before it (after it if included) and nothing is held. `may_stop` False lets matches pass."""
        if not self._stop:
            return text, False
        text = self._held + text
        if may_stop:
            found = [(text.find(stop), -len(stop)) for stop in self._stop if stop in text]
            if found:
                start, negative_length = min(found)
                self._held = ""
                return text[: start - negative_length if self._include_in_output else start], True
        num_held = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], False

    def flush(self) -> str:
        """What was held back, as no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
