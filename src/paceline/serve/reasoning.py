"""Splits a model's thinking from its answer, as text arrives. Knows the two tags, nothing of templates or HTTP."""

from __future__ import annotations

from dataclasses import dataclass

THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True)
class ReasoningDelta:
    """What a piece of text added to each part; either may be empty."""

    reasoning: str = ""
    content: str = ""


def held_back(text: str, tags: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may be the beginning of one of `tags`."""
    for length in range(min(len(text), max(map(len, tags)) - 1), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags if len(tag) > length):
            return length
    return 0


def starts_in_thought(prompt: str) -> bool:
    """Whether a rendered prompt leaves a thought open, so that the output begins inside it without a tag."""
    return prompt.rfind(THINK) > prompt.rfind(END_THINK)


class ReasoningSplitter:
    """`feed` pieces of an output, `finish` at its end. Text that may turn out to be a tag is held back until it is
    clear, so no part of a tag is ever shown. A thought may stand only at the beginning; blanks around the tags go.

    `in_thought`: the output begins inside a thought (see `starts_in_thought`).
    """

    def __init__(self, in_thought: bool = False):
        self._state = "thought" if in_thought else "start"
        self._buffer = ""
        self._pending_blanks = ""
        self._at_beginning = True  # of the current part, where blanks are dropped

    @property
    def in_thought(self) -> bool:
        return self._state == "thought"

    def feed(self, text: str) -> ReasoningDelta:
        if self._state == "content" and not self._at_beginning:
            return ReasoningDelta(content=text)
        self._buffer += text
        reasoning = ""
        if self._state == "start" and not self._open():
            return ReasoningDelta()
        if self._state == "thought":
            reasoning = self._thought()
        content = ""
        if self._state == "content":
            content, self._buffer = self._buffer, ""
            if self._at_beginning:
                content = content.lstrip()
                self._at_beginning = not content
        return ReasoningDelta(reasoning, content)

    def finish(self) -> ReasoningDelta:
        """What was held back: an unfinished tag is text after all."""
        rest, self._buffer = self._pending_blanks + self._buffer, ""
        self._pending_blanks = ""
        return ReasoningDelta(reasoning=rest.rstrip()) if self._state == "thought" else ReasoningDelta(content=rest)

    def _open(self) -> bool:
        """Decide whether the output begins with a thought; False while that is not clear yet."""
        begun = self._buffer.lstrip()
        if begun.startswith(THINK):
            self._state, self._buffer = "thought", begun[len(THINK) :]
        elif THINK.startswith(begun):
            return False
        else:
            self._state, self._at_beginning = "content", False
        return True

    def _thought(self) -> str:
        thought, tag, rest = self._buffer.partition(END_THINK)
        if tag:
            self._state, self._buffer = "content", rest
            thought = (self._pending_blanks + thought).rstrip()
            self._pending_blanks = ""
            shown = thought.lstrip() if self._at_beginning else thought
            self._at_beginning = True
            return shown
        held = held_back(thought, (END_THINK,))
        ready, self._buffer = self._pending_blanks + thought[: len(thought) - held], thought[len(thought) - held :]
        if self._at_beginning:
            ready = ready.lstrip()
        shown = ready.rstrip()  # blanks wait: they are dropped if the thought ends here
        self._pending_blanks = ready[len(shown) :]
        self._at_beginning = self._at_beginning and not shown
        return shown
