"""/v1/responses, asked by the real openai client: create, stream and parse."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from pydantic import BaseModel
from servers import SlowBackend, running

from fake_engine import EOS, VOCAB_SIZE
from paceline.runtime.backend_fake import FakeBackend
from paceline.runtime.drafting.suffix import SuffixDrafter
from paceline.serve.access import ServeOptions

SCRIPT = {
    b"u:think\na:": b"<think>hm, well</think>\nyes",
    b"u:call\na:": b'Wait. <tool_call>\n{"name": "look", "arguments": {"on": true}}\n</tool_call>\n<tool_call>\n'
    b'{"name": "look", "arguments": {"on": false}}\n</tool_call>',
}
LOOK = {"type": "function", "name": "look", "parameters": {
    "type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}}  # fmt: skip
GREEDY = {"model": "bytes", "temperature": 0, "max_output_tokens": 300}


@pytest.fixture(scope="module")
def server():
    script = {tuple(prompt): (*text, EOS) for prompt, text in SCRIPT.items()}
    backend = FakeBackend(VOCAB_SIZE, num_blocks=3000, context=1, script=script)
    with running(backend, drafter=SuffixDrafter(10_000, 2)) as started:
        yield started


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def post(server, **body):
    return httpx.post(server.url + "/v1/responses", json={**GREEDY, **body})


def test_text(client):
    response = client.responses.create(input="hello", **GREEDY | {"max_output_tokens": 12}, metadata={"a": "b"})
    chat = client.chat.completions.create(messages=[{"role": "user", "content": "hello"}], model="bytes", temperature=0,
                                          max_tokens=12)  # fmt: skip
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.id.startswith("resp_") and response.store is False and response.metadata == {"a": "b"}
    assert response.usage.output_tokens == 12 and response.usage.input_tokens == len("u:hello\na:")
    assert response.usage.speculation["num_rounds"] > 0
    [message] = response.output
    assert message.type == "message" and message.status == "incomplete" and message.content[0].annotations == []


def test_thoughts_are_items_of_their_own(client):
    response = client.responses.create(input="think", **GREEDY)
    assert [item.type for item in response.output] == ["reasoning", "message"] and response.status == "completed"
    assert response.output[0].content[0].text == "hm, well" and response.output_text == "yes"
    assert response.usage.output_tokens_details.reasoning_tokens >= len("hm, well")
    assert response.completed_at >= response.created_at


def test_calls_are_items_of_their_own(client):
    response = client.responses.create(input="call", tools=[LOOK], **GREEDY)
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    assert response.output_text == "Wait."
    assert [json.loads(item.arguments) for item in response.output[1:]] == [{"on": True}, {"on": False}]
    assert len({item.call_id for item in response.output[1:]}) == 2 and response.tools[0].name == "look"


@pytest.mark.parametrize("asked", ["hello", "think", "call"])
def test_a_stream_builds_up_what_the_whole_answer_is(client, asked):
    ask = {"input": asked, "tools": [LOOK], **GREEDY, "max_output_tokens": 120}
    whole = client.responses.create(**ask)
    events = list(client.responses.create(stream=True, **ask))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    built: dict[int, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            built[event.output_index] = built.get(event.output_index, "") + event.delta
    done = [event.item for event in events if event.type == "response.output_item.done"]

    def content(item):
        return item.arguments if item.type == "function_call" else item.content[0].text

    assert [content(item) for item in done] == [content(item) for item in whole.output] == list(built.values())
    assert [content(item) for item in events[-1].response.output] == list(built.values())
    open_items = [event.type for event in events if event.type.startswith("response.output_item.")]
    assert open_items == ["response.output_item.added", "response.output_item.done"] * len(done)


def test_the_clients_stream_helper(client):
    with client.responses.stream(input="call", tools=[LOOK], **GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds and len(final.output) == 3
    assert final.output[1].arguments == '{"on": true}'


class Point(BaseModel):
    x: bool
    y: bool


def test_parsed_schemas(client):
    response = client.responses.parse(input="hello", text_format=Point, **GREEDY)
    assert isinstance(response.output_parsed, Point)
    with client.responses.stream(input="hello", text_format=Point, **GREEDY) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == response.output_parsed


def test_required_and_named_tools(client):
    for choice in ("required", {"type": "function", "name": "look"}):
        ask = {"tools": [LOOK], "tool_choice": choice, "parallel_tool_calls": False}
        response = client.responses.create(input="x", **ask, **GREEDY)
        [call] = response.output
        assert call.type == "function_call" and set(json.loads(call.arguments)) == {"on"}


def test_earlier_turns_are_sent_as_input(client, server):
    first = client.responses.create(input="call", tools=[LOOK], **GREEDY)
    call = first.output[1]
    items = [
        {"role": "user", "content": "call"},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "dark"},
        {"type": "function_call_output", "call_id": call.call_id, "output": [{"type": "input_text", "text": "light"}]},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "brief"}]},
    ]
    used = client.responses.create(input=items, instructions="Do.", **GREEDY | {"max_output_tokens": 1}).usage
    assert used.input_tokens == len("s:Do.\nu:call\na:Wait.\nt:dark\nt:light\ns:brief\na:")


def test_thoughts_and_calls_that_come_first_make_a_message(client):
    items = [
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "dark"},
    ]
    assert client.responses.create(input=items, **GREEDY).usage.input_tokens == len("a:\nt:dark\na:")


def test_logprobs(client):
    for ask in ({"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}):
        response = client.responses.create(input="hello", **ask, **GREEDY | {"max_output_tokens": 9})
        logprobs = response.output[0].content[0].logprobs
        assert len(logprobs) == 9 and len(logprobs[0].top_logprobs) == ask.get("top_logprobs", 0)
    stream = client.responses.create(input="hello", top_logprobs=1, stream=True, **GREEDY | {"max_output_tokens": 9})
    deltas = [event for event in stream if event.type == "response.output_text.delta"]
    assert sum(len(event.logprobs) for event in deltas) == 9


def test_predictions_and_speculation(client):
    plain = client.responses.create(input="hello", **GREEDY)
    ours = {"prediction": {"type": "content", "content": plain.output_text}, "speculation": {"num_draft_tokens": 8}}
    response = client.responses.create(input="hello", extra_body=ours, **GREEDY)
    assert response.output_text == plain.output_text
    assert response.usage.output_tokens_details.accepted_prediction_tokens > 200
    assert response.usage.speculation["num_rounds"] < plain.usage.output_tokens / 4


def test_inputs_that_are_too_long(client, server):
    turns = [{"role": role, "content": "x" * 300} for _ in range(6) for role in ("user", "assistant")]
    turns += [{"role": "user", "content": "last"}]
    with pytest.raises(openai.BadRequestError, match="max_seq_len"):
        client.responses.create(input=turns, **GREEDY)
    response = client.responses.create(input=turns, instructions="Do.", truncation="auto", **GREEDY)
    assert response.truncation == "auto" and 1000 < response.usage.input_tokens <= 1700
    with pytest.raises(openai.BadRequestError, match="max_seq_len"):
        client.responses.create(input="x" * 3000, truncation="auto", **GREEDY)


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": ""}, "input", "at least 1"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "nothing is stored here"),
        ({"input": [{"type": "computer_call"}]}, "input.0", "`computer_call` are not known here"),
        ({"input": [{"role": "user"}]}, "input.0", "needs `content`"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input.0.content.0", "reads text only"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"input": "x", "conversation": "c"}, "conversation", "nothing is stored"),
        ({"input": "x", "background": True}, "background", "False"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0", "do not run here"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools.0", "needs a `name`"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "n", "schema": 5}}},
         "text.format.schema", "a JSON schema"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"input": "x", "top_logprobs": 50}, "top_logprobs", "at most 20"),
        ({"input": "x", "max_tokens": 5}, "max_tokens", "not a parameter"),
    ],
)  # fmt: skip
def test_refusals_name_the_parameter_as_it_is_called_here(server, body, param, why):
    answer = post(server, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and why in error["message"], error
    if param:
        assert f"`{param}`" in error["message"]


def test_nothing_is_stored(server, client):
    response = client.responses.create(input="hello", store=True, **GREEDY)
    assert response.store is False
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="no response is stored"):
            ask(response.id)


def test_a_stream_that_fails_says_so():
    slow = SlowBackend(VOCAB_SIZE, num_blocks=2000, context=1)
    with running(slow, options=ServeOptions(request_timeout_seconds=0.15)) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        events = list(client.responses.create(input="x", stream=True, **GREEDY | {"max_output_tokens": 1500}))
        assert events[-1].type == "response.failed" and "longer than" in events[-1].response.error.message
        with pytest.raises(openai.InternalServerError, match="longer than"):
            client.responses.create(input="x", **GREEDY | {"max_output_tokens": 1500})
        server.idle()
