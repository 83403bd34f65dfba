"""Tools: calls read from text in any pieces, the grammar of required calls, what the template is given."""

from __future__ import annotations

import json

import pytest

from fake_engine import EOS, TOKENIZER, VOCAB_SIZE, byte_tokenizer, make_engine
from paceline.errors import RequestError
from paceline.runtime.grammar import Grammars
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.sequence import FinishReason, Request, SpeculationParams
from paceline.serve.tools import (
    ToolCallParser,
    format_of,
    grammar_from_tools,
    has_tag_tokens,
    template_messages,
    template_tools,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "maximum": 9, "minimum": 1}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
TOOLS = [WEATHER, CLOCK]
ARGUMENTS = '{"city": "Oslo", "note": "a \\"}</tool_call>\\" {["}'


def read(tool_format, text, size):
    """Content and calls (name, arguments) of `text` fed in pieces of `size` characters; every piece of content."""
    parser = ToolCallParser(tool_format, ["weather", "clock"])
    deltas = [d for i in range(0, len(text), size) for d in parser.feed(text[i : i + size])] + parser.finish()
    calls = [[delta.name, ""] for delta in deltas if delta.call_id]
    ids = [delta.call_id for delta in deltas if delta.call_id]
    assert len(set(ids)) == len(ids) == parser.num_calls
    for delta in deltas:
        if delta.index is not None:
            calls[delta.index][1] += delta.arguments
    return "".join(delta.content for delta in deltas), [tuple(call) for call in calls]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("tool_format", "text", "content", "calls"),
    [
        ("hermes", "Just < text <tool", "Just < text <tool", []),
        ("hermes", f'Wait.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
         "Wait.", [("weather", ARGUMENTS)]),
        ("hermes", '<tool_call>{"name":"clock","arguments":{}}</tool_call>\n<tool_call>\n{"name": "weather", '
         '"arguments": {"city": "Rome"}}\n</tool_call>\n', "", [("clock", "{}"), ("weather", '{"city": "Rome"}')]),
        ("hermes", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
         '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', []),
        ("hermes", "<tool_call>nonsense", "<tool_call>nonsense", []),
        ("hermes", '<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city', "", [("weather", '{"city')]),
        ("llama3", f'{{"name": "weather", "parameters": {ARGUMENTS}}}', "", [("weather", ARGUMENTS)]),
        ("llama3", '<|python_tag|>{"name": "clock", "parameters": {}}; {"name": "weather", "parameters": {"city": 1}}',
         "", [("clock", "{}"), ("weather", '{"city": 1}')]),
        ("llama3", "It is {late}.", "It is {late}.", []),
        ("llama3", '{"city": "Oslo"}', '{"city": "Oslo"}', []),
    ],
)  # fmt: skip
def test_calls_are_read_from_text_in_any_pieces(tool_format, text, content, calls, size):
    assert read(tool_format, text, size) == (content, calls)


def test_arguments_are_streamed_as_they_come():
    parser = ToolCallParser("hermes", ["clock"])
    parser.feed('<tool_call>{"name": "clock", "arguments": {"a')
    assert [d.arguments for d in parser.feed('": 1')] == ['": 1']


@pytest.mark.parametrize(
    ("choice", "parallel", "tool_format", "accepted", "refused"),
    [
        ("required", True, "hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n'
         '</tool_call>\n<tool_call>\n{"name": "clock", "arguments": {', '<tool_call>\n{"name": "other'),
        ("required", False, "hermes", '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n'
         "</tool_call>", '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"'),
        ({"type": "function", "function": {"name": "clock"}}, True, "llama3", '{"name": "clock", "parameters": {"a": 1',
         '{"name": "weather"'),
    ],
)  # fmt: skip
def test_grammar_of_calls_that_must_come(choice, parallel, tool_format, accepted, refused):
    spec = grammar_from_tools(TOOLS, choice, parallel, tool_format)
    matcher = Grammars(TOKENIZER, VOCAB_SIZE, [EOS]).matcher(spec)
    assert matcher.permitted(list(accepted.encode())) == len(accepted)
    assert matcher.permitted(list(refused.encode())) < len(refused)


ADD = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


@pytest.mark.parametrize(
    ("function", "accepted", "refused"),
    [
        ({"name": "add", "parameters": ADD}, '{"a": 1, "b": 2}', '{"a": 1, "b": 2, "c": 1}'),
        ({"name": "add", "parameters": ADD, "strict": True}, '{"a": 1, "b": 2}', '{"a": 1, "b": 2, "c": 1}'),
        ({"name": "add", "parameters": ADD, "strict": False}, '{"a": 1, "b": 2, "c": 1}', '{"a": 1}'),
        ({"name": "add"}, "{}", '{"a": 1}'),
    ],
)
def test_arguments_are_those_the_tool_lists(function, accepted, refused):
    spec = grammar_from_tools([{"type": "function", "function": function}], "required", False, "llama3")
    for text, all_of_it in ((accepted, True), (refused, False)):
        ids = TOKENIZER.encode(f'{{"name": "add", "parameters": {text}}}').ids
        assert (Grammars(TOKENIZER, VOCAB_SIZE, [EOS]).matcher(spec).permitted(ids) == len(ids)) == all_of_it


def test_tags_that_are_tokens():
    """As in Qwen's tokenizer: the grammar asks for the token, not for its characters."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    assert has_tag_tokens(tokenizer)
    assert not has_tag_tokens(TOKENIZER)
    spec = grammar_from_tools([CLOCK], "required", True, "hermes", tags_are_tokens=True)
    matcher = Grammars(tokenizer, tokenizer.get_vocab_size(), [EOS]).matcher(spec)
    call = tokenizer.encode('<tool_call>\n{"name": "clock", "arguments": {"a": 1}}\n</tool_call>').ids
    assert {call[0], call[-1]} == {257, 258}
    assert matcher.forced()[0] == 257
    assert matcher.permitted(call) == len(call)


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_a_free_choice_has_no_grammar(choice):
    assert grammar_from_tools(TOOLS, choice, True, "hermes") is None


@pytest.mark.parametrize(
    ("tools", "choice"),
    [(None, "required"), (TOOLS, {"type": "function", "function": {"name": "gone"}}), (TOOLS, "sometimes")],
)
def test_a_choice_that_cannot_be_is_refused(tools, choice):
    with pytest.raises(RequestError, match="tool_choice") as refused:
        grammar_from_tools(tools, choice, True, "hermes")
    assert refused.value.field == "tool_choice"


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}])
@pytest.mark.parametrize("tool_format", ["hermes", "llama3"])
def test_required_calls_are_valid_and_the_same_under_speculation(tool_format, sampling):
    spec = grammar_from_tools([WEATHER], "required", False, tool_format)
    params = SamplingParams(max_tokens=110, grammar=spec, **sampling)
    for prompt in (b"a", b"b", b"c"):
        off, on = (
            make_engine(max_seq_len=200).generate([Request("r", tuple(prompt), params, SpeculationParams(enabled))])[0]
            for enabled in (False, True)
        )
        assert (on.token_ids, on.text, on.finish_reason) == (off.token_ids, off.text, FinishReason.STOP)
        assert "forced" in on.origins
        content, [(name, arguments)] = read(tool_format, on.text, 5)
        assert (content, name) == ("", "weather")
        assert json.loads(arguments)["city"] in ("Oslo", "Rome")


def test_what_the_template_is_given():
    assert template_tools(TOOLS, "none") is None
    assert template_tools(TOOLS, "auto") == TOOLS
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}
    [message] = template_messages([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert call["function"]["arguments"] == '{"a": 1}'
    call["function"]["arguments"] = "[1"
    with pytest.raises(RequestError, match="tool_calls"):
        template_messages([{"role": "assistant", "tool_calls": [call]}])


def test_the_format_is_the_templates():
    assert format_of("... <tool_call> ...") == "hermes"
    assert format_of('Respond in the format {"name": function name, "parameters": dictionary}') == "llama3"
    assert format_of(None) == "hermes"
