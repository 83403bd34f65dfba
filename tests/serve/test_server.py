"""The server over real sockets, asked by the real openai client."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import SlowBackend, running

from fake_engine import VOCAB_SIZE, ScriptedDrafter
from paceline.runtime.drafting.suffix import SuffixDrafter
from paceline.serve.access import ServeOptions

GREEDY = {"model": "bytes", "temperature": 0, "max_tokens": 24}


def client_of(server, **options):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, **options)


@pytest.fixture(scope="module")
def server():
    with running(drafter=SuffixDrafter(10_000, 2)) as started:
        yield started


@pytest.fixture(scope="module")
def plain_server():
    with running() as started:
        yield started


def messages(text):
    return [{"role": "user", "content": text}]


def slow(**options):
    return running(SlowBackend(VOCAB_SIZE, num_blocks=2000, context=1), drafter=SuffixDrafter(1000, 2), **options)


def test_chat_whole_and_streamed_are_the_same(server):
    client = client_of(server)
    whole = client.chat.completions.create(messages=messages("hello"), **GREEDY)
    chunks = list(client.chat.completions.create(
        messages=messages("hello"), stream=True, stream_options={"include_usage": True}, **GREEDY
    ))  # fmt: skip
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content and text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == whole.choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens == len("u:hello\na:")
    assert all(chunk.id == chunks[0].id for chunk in chunks)


def test_async_client(server):
    async def ask():
        client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        asks = [client.completions.create(prompt=f"prompt {i % 3}", **GREEDY) for i in range(6)]
        return [answer.choices[0].text for answer in await asyncio.gather(*asks)]

    texts = asyncio.run(ask())
    assert texts[:3] == texts[3:] and len(set(texts)) == 3


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}, {"frequency_penalty": 1.0}, {"stop": ["e"]}])
def test_speculation_changes_no_text(server, plain_server, sampling):
    texts = set()
    for body in ({}, {"speculation": {"enabled": False}}, {"speculation": {"num_draft_tokens": 1}}):
        for each in (server, plain_server):
            answer = client_of(each).completions.create(
                prompt="abcabcabcabc", extra_body=body, **{**GREEDY, "max_tokens": 60, **sampling}
            )
            texts.add(answer.choices[0].text)
    assert len(texts) == 1


def test_reports_of_speculation(server):
    raw = client_of(server).completions.with_raw_response.create(prompt="xyxyxyxyxy", **{**GREEDY, "max_tokens": 100})
    report = raw.parse().usage.speculation
    assert json.loads(raw.headers["x-paceline-speculation"]) == report
    assert report["num_draft_tokens"] >= report["num_accepted_tokens"] > 0
    assert sum(report["accepted_per_position"]) == report["num_accepted_tokens"]
    assert report["num_rounds"] + report["num_accepted_tokens"] >= 100 > report["num_rounds"]
    assert report["ttft_ms"] >= report["queue_ms"] >= 0
    off = client_of(server).completions.create(prompt="xy", extra_body={"speculation": {"enabled": False}}, **GREEDY)
    assert off.usage.speculation["num_draft_tokens"] == 0 and off.usage.speculation["method"] is None


def test_several_prompts_and_choices(server):
    client = client_of(server)
    answer = client.completions.create(prompt=["one", "two"], n=2, echo=True, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:3] for choice in answer.choices] == ["one", "one", "two", "two"]
    ids = client.completions.create(prompt=[list(b"one"), list(b"two")], n=2, echo=True, **GREEDY)
    assert [c.text for c in ids.choices] == [c.text for c in answer.choices]
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(prompt=["one", "two"], n=2, echo=True, stream=True, **GREEDY):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [choice.text for choice in answer.choices]
    assert answer.usage.completion_tokens == 4 * 24


def test_logprobs_are_the_same_with_and_without_drafts(server):
    client = client_of(server)
    on, off = (
        client.chat.completions.create(
            messages=messages("ababab"), logprobs=True, top_logprobs=3, extra_body={"speculation": {"enabled": on}},
            **GREEDY,
        ).choices[0].logprobs.content
        for on in (True, False)
    )  # fmt: skip
    assert on == off and len(on) == 24
    for entry in on:
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob) and len(entry.top_logprobs) == 3
    legacy = client.completions.create(prompt="ababab", logprobs=2, **GREEDY).choices[0].logprobs
    assert len(legacy.tokens) == len(legacy.token_logprobs) == len(legacy.text_offset) == 24
    assert legacy.text_offset[0] == 0 and sorted(legacy.text_offset) == legacy.text_offset


def test_token_details(server):
    stream = client_of(server).completions.create(
        prompt="ababababab", stream=True, extra_body={"return_token_details": True}, **{**GREEDY, "max_tokens": 60}
    )
    details, text = [], ""
    for chunk in stream:
        details += chunk.choices[0].token_details
        text += chunk.choices[0].text
    assert "".join(detail["text"] for detail in details) == text and len(details) == 60
    assert {detail["origin"] for detail in details} == {"target", "suffix"}
    assert [d["round"] for d in details] == sorted(d["round"] for d in details)
    assert all(detail["logprob"] <= 0 for detail in details)


@pytest.mark.parametrize(
    "body, param, status",
    [
        ({"prompt": "x", "best_of": 2}, "best_of", 400),
        ({"prompt": "x", "temperature": -1}, "temperature", 400),
        ({"prompt": "x", "temperature": "hot"}, "temperature", 400),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", 400),
        ({"prompt": "x", "suffix": "y"}, "suffix", 400),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", 400),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", 400),
        ({"prompt": "x", "model": "other"}, "model", 404),
        ({"prompt": "x", "speculation": {"method": "draft"}}, None, 400),
        ({"prompt": "x", "speculation": {"gamma": 2}}, "speculation.gamma", 400),
        ({"prompt": "x", "guided_regex": "("}, "guided_regex", 400),
        ({"prompt": []}, "prompt", 400),
        ({"prompt": [9999]}, None, 400),
        ({"prompt": "x" * 3000}, None, 400),
        ({}, "prompt", 400),
    ],
)
def test_refusals_name_the_parameter(server, body, param, status):
    answer = httpx.post(server.url + "/v1/completions", json=body)
    error = answer.json()["error"]
    assert answer.status_code == status and set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param and f"`{param}`" in error["message"]
    server.idle()


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"prompt": NaN}', b"[" * 100_000])
def test_bodies_that_are_no_json(server, body):
    answer = httpx.post(server.url + "/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_lone_surrogates_are_refused(server):
    for path, body in (("completions", '{"prompt": "\\ud800"}'),
                       ("chat/completions", '{"messages": [{"role": "user", "content": "\\ud800"}]}')):  # fmt: skip
        answer = httpx.post(f"{server.url}/v1/{path}", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400


def test_chat_without_a_template_is_refused():
    with running(template=None) as server, pytest.raises(openai.BadRequestError, match="no chat template"):
        client_of(server).chat.completions.create(messages=messages("x"), **GREEDY)


def test_structured_output(server):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    formats = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    answer = client_of(server).chat.completions.create(messages=messages("x"), response_format=formats, **GREEDY)
    assert json.loads(answer.choices[0].message.content)["ok"] in (True, False)
    choice = client_of(server).completions.create(
        prompt="x", extra_body={"guided_choice": ["yes", "no"]}, **GREEDY
    )
    assert choice.choices[0].text in ("yes", "no") and choice.choices[0].finish_reason == "stop"


def test_required_tool_calls_whole_and_streamed(server):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {
        "type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"],
        "additionalProperties": False}}}]  # fmt: skip
    ask = {"messages": messages("x"), "tools": tools, "tool_choice": {"type": "function", "function": {"name": "look"}},
           **GREEDY, "max_tokens": 120}  # fmt: skip
    choice = client_of(server).chat.completions.create(**ask).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    [call] = choice.message.tool_calls
    assert call.function.name == "look" and isinstance(json.loads(call.function.arguments)["on"], bool)
    name, arguments = "", ""
    for chunk in client_of(server).chat.completions.create(stream=True, **ask):
        for delta in chunk.choices[0].delta.tool_calls or []:
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
    assert (name, arguments) == (call.function.name, call.function.arguments)


def test_a_client_that_leaves_frees_its_rows():
    with slow() as server:
        for stream in (True, False):
            body = json.dumps({"prompt": "ababab", "max_tokens": 1500, "temperature": 0, "stream": stream})
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" \
                   f"Content-Length: {len(body)}\r\n\r\n"  # fmt: skip
            host, port = server.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall((head + body).encode())
                while not server.engine.num_running:
                    time.sleep(0.002)
                generated = server.engine.metrics.generation_tokens
            server.idle(seconds=2)
            assert server.engine.metrics.generation_tokens - generated < 200
            assert server.engine.metrics.request_success["cancelled"] == (1 if stream else 2)
        assert client_of(server).completions.create(prompt="still here", **GREEDY).usage.completion_tokens == 24


def test_a_full_queue_says_when_to_come_back():
    with slow(max_queue=1, max_batch_size=1) as server, httpx.Client(base_url=server.url) as http:
        body = {"prompt": "x", "max_tokens": 500, "temperature": 0, "stream": True}
        with http.stream("POST", "/v1/completions", json=body), http.stream("POST", "/v1/completions", json=body):
            answer = http.post("/v1/completions", json=body)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error" and "--max-queue" in answer.text
            too_many = http.post("/v1/completions", json={"prompt": ["x"] * 5})
            assert too_many.status_code == 429
        server.idle()
        assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_a_request_that_takes_too_long_ends():
    with slow(options=ServeOptions(request_timeout_seconds=0.15)) as server:
        body = {"prompt": "x", "max_tokens": 1500, "temperature": 0}
        answer = httpx.post(server.url + "/v1/completions", json=body)
        assert answer.status_code == 504 and "--request-timeout" in answer.json()["error"]["message"]
        with httpx.stream("POST", server.url + "/v1/completions", json=body | {"stream": True}) as stream:
            events = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
        assert stream.status_code == 200 and "longer than" in json.loads(events[-1])["error"]["message"]
        with pytest.raises(openai.APIError, match="longer than"):
            list(client_of(server).completions.create(prompt="x", max_tokens=1500, stream=True, model="bytes"))
        server.idle()


def test_keys():
    with running(options=ServeOptions(api_keys=("secret", "other"))) as server:
        assert httpx.get(server.url + "/health").status_code == 200
        for authorization in (None, "Bearer wrong", "Basic secret", "ü", "Bearer"):
            headers = {} if authorization is None else {"authorization": authorization.encode("latin-1")}
            answer = httpx.get(server.url + "/v1/models", headers=headers)
            assert answer.status_code == 401 and answer.json()["error"]["type"] == "authentication_error"
        for key in ("secret", "other"):
            assert openai.OpenAI(base_url=server.url + "/v1", api_key=key).models.list().data[0].id == "bytes"


def test_bodies_that_are_too_large():
    with running(options=ServeOptions(max_body_bytes=1000)) as server:
        url = server.url + "/v1/completions"
        json_headers = {"content-type": "application/json"}
        assert httpx.post(url, content=b"x" * 2000, headers=json_headers).status_code == 413
        chunked = httpx.post(url, content=iter([b"x" * 600] * 3), headers=json_headers)
        assert chunked.status_code == 413
        assert httpx.post(url, json={"prompt": "x", "max_tokens": 2}).status_code == 200


def test_an_engine_that_dies_is_told_to_everybody():
    class Dying(SlowBackend):
        steps = 0

        def forward(self, batch):
            self.steps += 1
            if self.steps > 20:
                raise RuntimeError("the memory has a hole")
            return super().forward(batch)

    with running(Dying(VOCAB_SIZE, num_blocks=2000)) as server:
        told = []
        server.worker.on_failure = lambda: told.append(True)
        assert httpx.get(server.url + "/ready").status_code == 200
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": "x", "max_tokens": 500, "ignore_eos": True})
        assert answer.status_code == 503 and "the memory has a hole" in answer.json()["error"]["message"]
        ready = httpx.get(server.url + "/ready")
        assert ready.status_code == 503 and "the memory has a hole" in ready.text and told
        for path in ("/v1/completions", "/metrics", "/stats"):
            method = "POST" if path.startswith("/v1") else "GET"
            late = httpx.request(method, server.url + path, json={"prompt": "x"} if method == "POST" else None)
            assert late.status_code == 503
        assert httpx.get(server.url + "/health").status_code == 200


def test_a_slow_reader_delays_nobody(server):
    body = json.dumps({"prompt": "ab", "max_tokens": 1900, "temperature": 0, "stream": True, "ignore_eos": True,
                       "return_token_details": True})  # fmt: skip
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                           f"Content-Length: {len(body)}\r\n\r\n{body}".encode())  # fmt: skip
        while not server.engine.num_running:
            time.sleep(0.002)
        assert client_of(server, timeout=20).completions.create(prompt="x", **GREEDY).usage.completion_tokens == 24
    server.idle()


def test_priority_goes_first():
    with slow(max_batch_size=1) as server:

        async def ask():
            client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
            finished = []

            async def one(name, priority, max_tokens):
                await client.completions.create(prompt=name, model="bytes", max_tokens=max_tokens, temperature=0,
                                                extra_body={"priority": priority, "ignore_eos": True})  # fmt: skip
                finished.append(name)

            first = asyncio.create_task(one("running", 0, 60))
            while not server.engine.num_running:
                await asyncio.sleep(0.002)
            late = asyncio.create_task(one("late", 5, 5))
            while not server.engine.num_waiting:
                await asyncio.sleep(0.002)
            urgent = asyncio.create_task(one("urgent", -5, 5))
            await asyncio.gather(first, late, urgent)
            return finished

        assert asyncio.run(ask()) == ["running", "urgent", "late"]


def test_metrics_and_stats(server):
    client_of(server).completions.create(prompt="ababab", **GREEDY)
    text = httpx.get(server.url + "/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["paceline:generation_tokens"].samples[0].value >= 24
    first_token = families["paceline:time_to_first_token_seconds"].samples
    buckets = [sample.value for sample in first_token if sample.name.endswith("_bucket")]
    assert buckets == sorted(buckets) and buckets[-1] >= 1
    assert {"paceline:spec_decode_num_accepted_tokens_per_pos", "paceline:num_requests_running"} <= set(families)
    stats = httpx.get(server.url + "/stats").json()
    assert stats["kv_cache_usage"] == 0 and stats["num_draft_tokens"] == 4 and stats["ttft_ms"]["p95"] > 0


def test_small_routes(server):
    tokens = httpx.post(server.url + "/tokenize", json={"prompt": "hé"}).json()
    assert tokens["tokens"] == list("hé".encode()) and tokens["count"] == 3
    back = httpx.post(server.url + "/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back == {"prompt": "hé"}
    assert httpx.get(server.url + "/v1/models/bytes").json()["id"] == "bytes"
    assert httpx.get(server.url + "/v1/models/no").status_code == 404
    assert httpx.get(server.url + "/nope").json()["error"]["type"] == "not_found_error"
    assert httpx.put(server.url + "/v1/completions").status_code == 405


def test_cors_is_off_unless_asked_for():
    origin = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with running() as server:
        assert "access-control-allow-origin" not in httpx.options(server.url + "/v1/models", headers=origin).headers
    with running(options=ServeOptions(cors_origins=("https://a.example",))) as server:
        answer = httpx.options(server.url + "/v1/models", headers=origin)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"


def test_hostile_drafts_change_nothing():
    texts = set()
    for drafter in (None, ScriptedDrafter(error_rate=1.0), ScriptedDrafter(error_rate=0.5, obeys_limits=False)):
        with running(drafter=drafter) as server:
            texts.add(client_of(server).completions.create(prompt="abc", **GREEDY).choices[0].text)
    assert len(texts) == 1
