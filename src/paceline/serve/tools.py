"""Tools: what the template is told of them, the grammar of calls that must come, and calls read from arriving text.

Knows two spellings of a call, Hermes' (also Qwen's) and Llama 3's. Knows nothing of tokens or of HTTP.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers

from paceline.errors import RequestError
from paceline.runtime.grammar import GrammarSpec
from paceline.serve.reasoning import held_back
from paceline.serve.structured import strict_schema

ToolFormat = Literal["hermes", "llama3"]
_OPEN, _CLOSE, _PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
_NO_PARAMETERS = {"type": "object", "properties": {}}


@dataclass(frozen=True)
class Delta:
    """What a piece of text added: text for the user, or to call number `index`. `call_id` and `name` come once, with
    the call's first delta; `arguments` are pieces of JSON text to be joined."""

    content: str = ""
    index: int | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


def format_of(template: str | None) -> ToolFormat:
    """The spelling a chat template teaches; Hermes' where it does not say."""
    text = template or ""
    return "llama3" if _OPEN not in text and (_PYTHON_TAG in text or '"parameters": ' in text) else "hermes"


def template_tools(
    tools: SequenceOf[Mapping[str, Any]] | None, tool_choice: Any = None
) -> list[Mapping[str, Any]] | None:
    """The tools that the template shows the model: none with `tool_choice` "none"."""
    return None if not tools or tool_choice == "none" else list(tools)


def template_messages(messages: SequenceOf[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates expect them: the arguments of earlier calls as objects, not as JSON text, and content never
    null. Raises RequestError for arguments that are no JSON object."""
    rendered = []
    for index, message in enumerate(messages):
        message = {**message, "content": message.get("content") or ""}
        if message.get("tool_calls"):
            field = f"messages[{index}].tool_calls"
            message["tool_calls"] = [_with_arguments(call, field) for call in message["tool_calls"]]
        rendered.append(message)
    return rendered


def _with_arguments(call: Mapping[str, Any], field: str) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, Mapping):
        raise RequestError(
            f"`{field}` has arguments of `{function.get('name')}` that are no JSON object.",
            "send the arguments as they came, as JSON text",
            field=field,
        )
    return {**call, "function": {**function, "arguments": parsed}}


def grammar_from_tools(
    tools: SequenceOf[Mapping[str, Any]] | None,
    tool_choice: Any,
    parallel_tool_calls: bool,
    tool_format: ToolFormat,
    tags_are_tokens: bool = False,
) -> GrammarSpec | None:
    """The grammar of an output that must be calls (`tool_choice` "required", or one by name), with arguments by each
    tool's schema, and no others (unless its `strict` is false). None where the model is free ("auto", "none", no
    tools); with "auto" its calls are read as they are. `tags_are_tokens`: the tokenizer has `<tool_call>` and
    `</tool_call>` as tokens of their own (`has_tag_tokens`).

    Raises RequestError naming `tools` or `tool_choice` for what is not there.
    """
    if tool_choice in (None, "auto", "none"):
        return None
    if not tools:
        raise RequestError("`tool_choice` needs `tools`.", "send `tools`, or leave out `tool_choice`", "tool_choice")
    functions = [tool["function"] for tool in tools]
    at_most_one = not parallel_tool_calls
    if isinstance(tool_choice, Mapping):
        wanted = tool_choice["function"]["name"]
        functions = [function for function in functions if function["name"] == wanted]
        if not functions:
            raise RequestError(
                f"`tool_choice` names {wanted!r}, which is not among `tools`.", "name one of `tools`", "tool_choice"
            )
        at_most_one = True
    elif tool_choice != "required":
        raise RequestError(
            f'`tool_choice` must be "auto", "none", "required" or a function\'s name, got {str(tool_choice)[:80]!r}.',
            "correct `tool_choice` or leave it out",
            "tool_choice",
        )
    return GrammarSpec("grammar", _lark(functions, at_most_one, tool_format, tags_are_tokens), "tools")


def has_tag_tokens(tokenizer: tokenizers.Tokenizer) -> bool:
    return all(tokenizer.token_to_id(tag) is not None for tag in (_OPEN, _CLOSE))


def _lark(
    functions: SequenceOf[Mapping[str, Any]], at_most_one: bool, tool_format: ToolFormat, tags_are_tokens: bool
) -> str:
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    key = "arguments" if tool_format == "hermes" else "parameters"
    opening, closing, blank = "", "", ""
    if tool_format == "hermes":  # llguidance spells a token without quotes; quoted, it would refuse the token
        opening, closing = (_OPEN, _CLOSE) if tags_are_tokens else (json.dumps(_OPEN), json.dumps(_CLOSE))
        blank = "\n"
    separator = "\n" if tool_format == "hermes" else "; "
    lines = [
        "start: call" if at_most_one else f"start: call ({json.dumps(separator)} call)*",
        "call: " + " | ".join(f"call_{index}" for index in range(len(functions))),
    ]
    for index, function in enumerate(functions):
        schema = function.get("parameters") or _NO_PARAMETERS
        if function.get("strict") is not False:
            schema = strict_schema(schema, "tools")
        schema = {**schema, "x-guidance": options}
        head = f'{blank}{{"name": {json.dumps(function["name"])}, "{key}": '
        lines += [
            f"call_{index}: {opening} {json.dumps(head)} arguments_{index} {json.dumps('}' + blank)} {closing}",
            f"arguments_{index}: %json {json.dumps(schema)}",
        ]
    return "\n".join(lines)


class ToolCallParser:
    """Reads calls out of an output as it arrives: `feed` pieces of text, `finish` at the end.

    Whatever may yet turn out to be part of a tag or of a call's head is held back; arguments are passed on as they
    come, byte for byte as the model wrote them. What looks like a call and is none becomes content, tags and all.
    """

    def __init__(self, tool_format: ToolFormat, tool_names: SequenceOf[str]):
        self._format = tool_format
        self._names = frozenset(tool_names)
        self._buffer = ""
        self._state = "text" if tool_format == "hermes" else "start"
        self._opening = ""  # the tag that opened this call, to give back if it is none
        self._arguments: _JsonValue | None = None
        self.num_calls = 0

    def feed(self, text: str) -> list[Delta]:
        self._buffer += text
        deltas: list[Delta] = []
        while self._advance(deltas):
            pass
        return [delta for delta in deltas if delta != Delta()]

    def finish(self) -> list[Delta]:
        """What was held back, as content; nothing of a call that was begun, or of blanks between calls."""
        rest, self._buffer = self._buffer, ""
        if self._state in ("arguments", "closing"):
            return []
        rest = self._opening + rest if self._state == "head" else rest
        return [Delta(content=rest)] if rest and not (self.num_calls and not rest.strip(" \n;")) else []

    def _advance(self, deltas: list[Delta]) -> bool:
        """One move from the front of the buffer; False when more text is needed."""
        return getattr(self, f"_in_{self._state}")(deltas)

    def _in_text(self, deltas: list[Delta]) -> bool:
        text, tag, rest = self._buffer.partition(_OPEN)
        if not tag:
            held = held_back(text, (_OPEN,))
            blanks = len(text[: len(text) - held]) - len(text[: len(text) - held].rstrip())
            ready = text[: len(text) - held - blanks]  # blanks before a call belong to it
            self._buffer = text[len(ready) :]
            if ready:
                deltas.append(Delta(content=ready))
            return False
        deltas.append(Delta(content=text.rstrip()))
        self._buffer, self._opening, self._state = rest, text[len(text.rstrip()) :] + _OPEN, "head"
        return True

    def _in_start(self, deltas: list[Delta]) -> bool:
        """Llama 3: a call, perhaps after its tag, fills the whole output, or there is none."""
        begun = self._buffer.lstrip()
        if not begun or _PYTHON_TAG.startswith(begun):
            return False
        if begun.startswith(_PYTHON_TAG):
            self._opening, self._buffer, self._state = _PYTHON_TAG, begun[len(_PYTHON_TAG) :], "head"
        elif begun.startswith("{"):
            self._opening, self._state = "", "head"
        else:
            self._state = "plain"
        return True

    def _in_plain(self, deltas: list[Delta]) -> bool:
        deltas.append(Delta(content=self._buffer))
        self._buffer = ""
        return False

    def _in_head(self, deltas: list[Delta]) -> bool:
        head = _read_head(self._buffer)
        if head is None:
            return False
        if head.name not in self._names:
            deltas.append(Delta(content=self._opening))
            self._state = "text" if self._format == "hermes" else "plain"
            return True
        call_id = f"call_{secrets.token_hex(12)}"
        deltas.append(Delta(index=self.num_calls, call_id=call_id, name=head.name))
        self.num_calls += 1
        self._buffer, self._arguments, self._state = self._buffer[head.length :], _JsonValue(), "arguments"
        return True

    def _in_arguments(self, deltas: list[Delta]) -> bool:
        num_taken = self._arguments.feed(self._buffer)
        if num_taken:
            deltas.append(Delta(index=self.num_calls - 1, arguments=self._buffer[:num_taken]))
        self._buffer = self._buffer[num_taken:]
        if self._arguments.over:
            self._state = "closing"
        return self._arguments.over

    def _in_closing(self, deltas: list[Delta]) -> bool:
        """Skip what closes a call; for Llama 3 the next call, after a semicolon, may follow."""
        if self._format == "llama3":
            rest = self._buffer.lstrip("} \n;")
            self._buffer = rest
            if rest:
                self._opening, self._state = "", "head" if rest.startswith("{") else "plain"
            return bool(rest)
        _, tag, rest = self._buffer.partition(_CLOSE)
        if tag:
            self._buffer, self._state = rest, "text"
        return bool(tag)


@dataclass(frozen=True)
class _Head:
    name: str | None  # None: this is no call
    length: int = 0  # characters up to the arguments' first


def _read_head(text: str) -> _Head | None:
    """The part of a call before its arguments: `{"name": "...", "arguments": ` or with "parameters", in any spacing.
    None while it may still become one."""
    scanner = _Scanner(text)
    if not scanner.expect("{"):
        return None if scanner.at_end else _Head(None)
    for key in (("name",), ("arguments", "parameters")):
        found = scanner.string()
        if found is None:
            return None if scanner.at_end else _Head(None)
        if found not in key:
            return _Head(None)
        if not scanner.expect(":"):
            return None if scanner.at_end else _Head(None)
        if key == ("name",):
            name = scanner.string()
            if name is None or not scanner.expect(","):
                return None if scanner.at_end else _Head(None)
    if not scanner.peek("{"):
        return None if scanner.at_end else _Head(None)
    return _Head(name, scanner.position)


class _Scanner:
    """Steps through the beginning of a JSON text. `at_end`: the last step failed only because the text ended."""

    def __init__(self, text: str):
        self._text = text
        self.position = 0
        self.at_end = False

    def peek(self, character: str) -> bool:
        while self.position < len(self._text) and self._text[self.position] in " \t\r\n":
            self.position += 1
        self.at_end = self.position >= len(self._text)
        return not self.at_end and self._text[self.position] == character

    def expect(self, character: str) -> bool:
        found = self.peek(character)
        self.position += found
        return found

    def string(self) -> str | None:
        if not self.peek('"'):
            return None
        try:
            value, self.position = json.decoder.scanstring(self._text, self.position + 1)
        except ValueError:
            self.at_end = True  # not closed yet; a string that never is ends with the output
            return None
        return value


class _JsonValue:
    """Follows one JSON object or array through pieces of text to its last bracket."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.over = False

    def feed(self, text: str) -> int:
        """How many characters of `text` belong to the value."""
        for index, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.over = True
                    return index + 1
        return len(text)
