"""Every parameter of OpenAI's and vLLM's requests: honoured, accepted where it changes nothing, or refused with why."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from servers import TEMPLATE, running

from paceline.runtime.drafting.suffix import SuffixDrafter

GREEDY = {"model": "bytes", "temperature": 0, "max_tokens": 12}
# Shows whatever the server passes to a template.
TELLING = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }}"
    "{{ c.function.arguments | tojson }}){% endfor %};{% endfor %}{% if tools %}T{{ tools | length }}{% endif %}"
    "{{ reasoning_effort }}|{{ verbosity }}|{{ enable_thinking }}|{{ documents | length if documents else '' }}|"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="module")
def server():
    with running(drafter=SuffixDrafter(10_000, 2)) as started:
        yield started


@pytest.fixture(scope="module")
def telling():
    with running(template=TELLING) as started:
        yield started


def client_of(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def chat(server, messages="hello", **body):
    messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    return httpx.post(server.url + "/v1/chat/completions", json={"messages": messages, **GREEDY, **body})


def complete(server, prompt="hello", **body):
    return httpx.post(server.url + "/v1/completions", json={"prompt": prompt, **GREEDY, **body})


def prompt_of(server, messages="hello", **body):
    """What the template made of a chat, read back from the token ids."""
    answer = chat(server, messages, return_token_ids=True, **body)
    assert answer.status_code == 200, answer.text
    return bytes(answer.json()["prompt_token_ids"]).decode()


HARMLESS = [
    {"metadata": {"team": "a"}}, {"store": True}, {"store": False}, {"service_tier": "auto"}, {"user": "me"},
    {"safety_identifier": "x"}, {"prompt_cache_key": "x"}, {"session_id": "x"}, {"use_beam_search": False},
    {"length_penalty": 1.0}, {"spaces_between_special_tokens": False}, {"stop": None, "seed": None, "priority": None},
]  # fmt: skip
CHAT_HARMLESS = [
    {"verbosity": "low"}, {"reasoning_effort": "high"}, {"modalities": ["text"]}, {"max_completion_tokens": 12},
    {"max_completion_tokens": 50}, {"parallel_tool_calls": False}, {"top_logprobs": 0}, {"include_reasoning": False},
    {"add_generation_prompt": True}, {"logprobs": False}, {"audio": None, "web_search_options": None},
]  # fmt: skip


@pytest.mark.parametrize("body", HARMLESS + CHAT_HARMLESS, ids=str)
def test_what_every_client_may_send_changes_nothing(server, body):
    expected = chat(server).json()["choices"]
    assert chat(server, **body).json()["choices"] == expected
    if body in HARMLESS:
        assert complete(server, **body).json()["choices"] == complete(server).json()["choices"]


def test_the_service_tier_is_answered_if_asked_for(server):
    assert "service_tier" not in chat(server).json()
    assert chat(server, service_tier="flex").json()["service_tier"] == "default"


@pytest.mark.parametrize(
    ("body", "param", "why"),
    [
        ({"audio": {"voice": "x", "format": "wav"}}, "audio", "writes text only"),
        ({"modalities": ["text", "audio"]}, "modalities.1", "'text'"),
        ({"web_search_options": {}}, "web_search_options", "searches nothing"),
        ({"chat_template": "x"}, "chat_template", "a template is code"),
        ({"logits_processors": []}, "logits_processors", "not run here"),
        ({"use_beam_search": True}, "use_beam_search", "False"),
        ({"max_tokens": 9, "max_completion_tokens": 8}, "max_tokens", "`max_completion_tokens` (8)"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "no prompt"),
        ({"bad_words": [" "]}, "bad_words", "blank"),
        ({"request_id": "a b"}, "request_id", "pattern"),
        ({"cache_salt": ""}, "cache_salt", "at least 1"),
        ({"functions": [{"name": "f"}], "tools": []}, "functions", "older form of `tools`"),
        ({"function_call": "auto"}, "function_call", "needs `functions`"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "set one"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
        ({"prediction": {"type": "content", "content": 5}}, "prediction.content", "valid"),
        ({"no_such_thing": 1}, "no_such_thing", "not a parameter"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'user'"),
    ],
)
def test_what_would_change_the_answer_is_refused_with_why(server, body, param, why):
    answer = chat(server, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error
    assert f"`{param}`" in error["message"] and why in error["message"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_parts_that_are_no_text_are_refused_in_plain_words(server, kind):
    for parts in ([{"type": kind, kind: {"url": "x"}}], [{"type": "text", "text": "What?"}, {"type": kind, kind: {}}]):
        error = chat(server, [{"role": "user", "content": parts}]).json()["error"]
        assert error["message"].startswith(f"`messages.0.content.{len(parts) - 1}`: this model reads text only")
        assert f"`{kind}`" in error["message"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"prompt": "x",}', "line 1, column 16 (character 15)"),
        (b'{\n  "prompt": "x"\n  "n": 1}', "Expecting ',' delimiter at line 3, column 3 (character 20)"),
        (b"", "the body"),
        (b"[1]", "no valid JSON object"),
        (b"nonsense", "no valid JSON: Expecting value at line 1, column 1 (character 0)"),
    ],
)
def test_broken_json_says_where(server, body, says):
    answer = httpx.post(server.url + "/v1/completions", content=body, headers={"content-type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and says in error["message"] and not (error["param"] or "").isdigit()


@pytest.mark.parametrize("sent_as", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_said_to_be_json(server, sent_as):
    """What curl -d sends. It stays refused: browsers let any page send such a body to a server on localhost."""
    headers = {} if sent_as is None else {"content-type": sent_as}
    answer = httpx.post(server.url + "/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 415 and "Content-Type: application/json" in answer.json()["error"]["message"]


def test_special_tokens_are_shown_if_asked_for(server):
    body = {"logit_bias": {"256": 100}, "ignore_eos": True, "max_tokens": 2}
    assert complete(server, **body).json()["choices"][0]["text"] == ""
    assert complete(server, skip_special_tokens=False, **body).json()["choices"][0]["text"] == "<end><end>"


def test_bad_words_do_not_come(server):
    text = complete(server, max_tokens=40).json()["choices"][0]["text"]
    words = [word for word in (text[i : i + 2] for i in range(39)) if word.isascii() and word.isalnum()]
    banned = [words[0], words[-1][0]]
    other = complete(server, max_tokens=40, bad_words=banned).json()["choices"][0]["text"]
    assert all(word in text for word in banned) and not any(word in other for word in banned)
    off = complete(server, max_tokens=40, bad_words=banned, speculation={"enabled": False}).json()["choices"][0]["text"]
    assert off == other


def test_only_allowed_tokens_come(server):
    answer = complete(server, max_tokens=30, allowed_token_ids=[97, 98]).json()["choices"][0]
    assert set(answer["text"]) <= {"a", "b"} and len(answer["text"]) == 30


def test_prompts_are_truncated(server):
    def tokens(**body):
        return complete(server, "0123456789", return_token_ids=True, **body).json()["choices"][0]["prompt_token_ids"]

    assert bytes(tokens()) == b"0123456789"
    assert bytes(tokens(truncate_prompt_tokens=3)) == b"789"
    assert bytes(tokens(truncate_prompt_tokens=3, truncation_side="right")) == b"012"
    assert bytes(tokens(truncate_prompt_tokens=-1)) == b"0123456789"
    long = complete(server, "x" * 3000, truncate_prompt_tokens=-1).json()
    assert long["usage"]["prompt_tokens"] == 2000 - GREEDY["max_tokens"]
    assert complete(server, "x" * 3000).status_code == 400
    echoed = complete(server, "0123456789", truncate_prompt_tokens=2, echo=True).json()["choices"][0]["text"]
    assert echoed.startswith("89")


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(server, stream):
    client, options = client_of(server), {"extra_body": {"return_token_ids": True}, "stream": stream, **GREEDY}
    for make, prompt in (
        (lambda: client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], **options), b"u:hi\na:"),
        (lambda: client.completions.create(prompt="hi", **options), b"hi"),
    ):
        answer = make()
        chunks = list(answer) if stream else [answer]
        ids = [token_id for chunk in chunks for choice in chunk.choices for token_id in choice.token_ids]
        owner = chunks[0].choices[0] if prompt == b"hi" else chunks[0]
        assert bytes(owner.prompt_token_ids) == prompt and len(ids) == 12
        assert sum("prompt_token_ids" in str(chunk) for chunk in chunks) == 1
        text = "".join(
            (c.choices[0].text if prompt == b"hi" else (c.choices[0].delta if stream else c.choices[0].message).content)
            or ""
            for c in chunks
        )
        assert bytes(ids).decode("utf-8", "replace") == text


def test_tokens_as_ids(server):
    logprobs = complete(server, logprobs=1, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]
    assert all(token.startswith("token_id:") for token in logprobs["tokens"])
    content = chat(server, logprobs=True, return_tokens_as_token_ids=True).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == f"token_id:{content[0]['bytes'][0]}"


def test_prompt_logprobs(server):
    answer = chat(server, "hi", prompt_logprobs=2).json()
    entries = answer["prompt_logprobs"]
    assert len(entries) == len("u:hi\na:") and entries[0] is None
    for entry, character in zip(entries[1:], ":hi\na:", strict=True):
        own = entry[str(ord(character))]
        assert own["decoded_token"] == character and own["logprob"] <= 0 and 2 <= len(entry) <= 3
        assert sorted(e["rank"] for e in entry.values())[:2] == [1, 2]
    completion = complete(server, ["hi", "you"], prompt_logprobs=0, n=2).json()
    assert [len(choice["prompt_logprobs"]) for choice in completion["choices"]] == [2, 2, 3, 3]
    assert completion["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_echoed_logprobs_score_a_text(server, max_tokens):
    """As evaluation harnesses ask: the probability of a text under the model."""
    answer = client_of(server).completions.create(model="bytes", prompt=["score é", "x"], echo=True, logprobs=1,
                                                  max_tokens=max_tokens, temperature=0)  # fmt: skip
    choice = answer.choices[0]
    lengths = len("score é".encode()) + max_tokens
    assert choice.text.startswith("score é") and (max_tokens or choice.text == "score é")
    logprobs = choice.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == lengths
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset[:7] == [0, 1, 2, 3, 4, 5, 6]
    assert answer.usage.completion_tokens == 2 * max_tokens
    by_hand = complete(server, "score é", prompt_logprobs=0, max_tokens=1).json()["choices"][0]["prompt_logprobs"]
    assert [next(iter(entry.values()))["logprob"] for entry in by_hand[1:]] == logprobs.token_logprobs[1 : len(by_hand)]


def test_request_ids_are_the_clients(server):
    assert chat(server, request_id="mine-7").json()["id"] == "chatcmpl-mine-7"
    assert complete(server, request_id="mine-7").json()["id"] == "cmpl-mine-7"
    answer = complete(server, ["a", "b"], request_id="mine-7")
    assert len(answer.json()["choices"]) == 2 and answer.headers["x-request-id"] == "cmpl-mine-7"


def test_salts_keep_tenants_apart(server):
    prompt = "a long enough prompt to fill some blocks"

    def cached(salt):
        return complete(server, prompt, cache_salt=salt).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [cached(salt) for salt in ("a", "a", "b", None, None, "b")] == [0, 36, 0, 0, 36, 36]


def test_usage_with_every_chunk(server):
    body = {"prompt": "x", "stream": True, "stream_options": {"continuous_usage_stats": True, "include_usage": True}}
    lines = httpx.post(server.url + "/v1/completions", json=GREEDY | body).text.split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 12


def test_what_the_template_is_told(telling):
    assert prompt_of(telling) == "user:hello;||||a:"
    told = prompt_of(telling, reasoning_effort="none", verbosity="low", documents=[{"text": "d"}],
                     chat_template_kwargs={"x": 1})  # fmt: skip
    assert told == "user:hello;none|low|False|1|a:"
    assert prompt_of(telling, chat_template_kwargs={"enable_thinking": True}, reasoning_effort="high").endswith(
        "high||True||a:"
    )
    assert not prompt_of(telling, add_generation_prompt=False).endswith("a:")
    for name in ("messages", "tools", "add_generation_prompt"):
        error = chat(telling, chat_template_kwargs={name: []}).json()["error"]
        assert f"`chat_template_kwargs.{name}` is set by the server" in error["message"]


def test_a_final_message_is_continued(server):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    answer = chat(server, messages, continue_final_message=True, return_token_ids=True).json()
    assert bytes(answer["prompt_token_ids"]).decode() == "u:hi\na:Well, "
    echoed = chat(server, messages, continue_final_message=True, echo=True).json()["choices"][0]["message"]["content"]
    assert echoed == "Well, " + answer["choices"][0]["message"]["content"]
    error = chat(server, [{"role": "assistant", "content": " "}], continue_final_message=True).json()["error"]
    assert error["param"] == "continue_final_message" and "with text" in error["message"]


def test_a_template_that_strips_blanks_is_continued_too():
    with running(template=TEMPLATE.replace("m.content", "m.content | trim")) as server:
        messages = [{"role": "assistant", "content": "  Well, "}]
        answer = chat(server, messages, continue_final_message=True, return_token_ids=True).json()
        assert bytes(answer["prompt_token_ids"]).decode() == "a:Well,"


SWITCH = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
FUNCTION = {"name": "look", "parameters": SWITCH}


def test_functions_of_the_older_form(server):
    client = client_of(server)
    ask = {"messages": [{"role": "user", "content": "x"}], "functions": [FUNCTION], "function_call": {"name": "look"},
           **GREEDY, "max_tokens": 120}  # fmt: skip
    choice = client.chat.completions.create(**ask).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    call = choice.message.function_call
    assert call.name == "look" and set(json.loads(call.arguments)) == {"on"} and choice.message.content is None
    name, arguments = "", ""
    for chunk in client.chat.completions.create(stream=True, **ask):
        piece = chunk.choices[0].delta.function_call
        name, arguments = name + ((piece and piece.name) or ""), arguments + ((piece and piece.arguments) or "")
    assert (name, arguments) == (call.name, call.arguments)
    none = client.chat.completions.create(**ask | {"function_call": "none", "max_tokens": 5})
    assert none.choices[0].message.function_call is None and none.choices[0].message.content


def test_messages_of_the_older_form(telling):
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"on": true}'}},
        {"role": "function", "name": "look", "content": "dark"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "refusal": None, "annotations": []},
    ]
    assert prompt_of(telling, messages).startswith(
        'user:x;assistant:(look{"on": true});tool:dark;assistant:No.;'
    )


def test_developers_are_the_system_where_the_template_does_not_know_them(telling):
    messages = [{"role": "developer", "content": "brief"}, {"role": "user", "content": "x"}]
    assert prompt_of(telling, messages).startswith("system:brief;user:x;")
    with running(template=TELLING + "{# developer #}") as knowing:
        assert prompt_of(knowing, messages).startswith("developer:brief;user:x;")


def test_no_extra_keys_in_json_or_arguments(server):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    formats = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    content = chat(server, response_format=formats, max_tokens=200).json()["choices"][0]["message"]["content"]
    assert json.loads(content) == {"a": 1}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    message = chat(server, tools=tools, tool_choice="required", max_tokens=200).json()["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


@pytest.mark.parametrize("parts", [False, True])
def test_predictions(server, parts):
    client = client_of(server)
    ask = {"messages": [{"role": "user", "content": "x"}], **GREEDY, "max_tokens": 60}
    plain = client.chat.completions.create(extra_body={"speculation": {"enabled": False}}, **ask)
    text = plain.choices[0].message.content
    details = plain.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    predicted = "Hm: " + text[:20] + "!!" + text[20:40]
    content = [{"type": "text", "text": t} for t in (predicted[:7], predicted[7:])] if parts else predicted
    answer = client.chat.completions.create(prediction={"type": "content", "content": content}, **ask)
    assert answer.choices[0].message.content == text
    details = answer.usage.completion_tokens_details
    assert 25 <= details.accepted_prediction_tokens <= 60
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens >= len(predicted)
    empty = client.chat.completions.create(prediction={"type": "content", "content": ""}, **ask)
    assert empty.choices[0].message.content == text
