"""Spans of requests, read from an in-memory exporter."""

from __future__ import annotations

import time

import httpx
import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from servers import SlowBackend, running

from fake_engine import VOCAB_SIZE
from paceline.errors import ConfigError
from paceline.runtime.drafting.suffix import SuffixDrafter
from paceline.serve.access import ServeOptions
from paceline.serve.tracing import tracer_provider

EXPORTER = InMemorySpanExporter()
PROVIDER = TracerProvider()
PROVIDER.add_span_processor(SimpleSpanProcessor(EXPORTER))
TRACER = PROVIDER.get_tracer("test")
GREEDY = {"model": "bytes", "temperature": 0, "max_tokens": 60}


def spans(number):
    """The next `number` spans; an answer may reach its client a moment before its last span is kept."""
    deadline = time.monotonic() + 10
    while len(EXPORTER.get_finished_spans()) < number and time.monotonic() < deadline:
        time.sleep(0.01)
    found = {span.name: span for span in EXPORTER.get_finished_spans()}
    assert len(EXPORTER.get_finished_spans()) == number, list(found)
    EXPORTER.clear()
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_phases(stream):
    with running(drafter=SuffixDrafter(1000, 2), tracer=TRACER) as server:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        trace_id, parent_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
        before = time.time_ns()
        answer = client.chat.completions.create(
            messages=[{"role": "user", "content": "ababab"}], stream=stream, **GREEDY,
            extra_headers={"traceparent": f"00-{trace_id}-{parent_id}-01"},
        )  # fmt: skip
        answer_id = list(answer)[-1].id if stream else answer.id
        found = spans(4)
    request = found.pop("chat bytes")
    assert request.kind is SpanKind.SERVER and format(request.context.trace_id, "032x") == trace_id
    assert format(request.parent.span_id, "016x") == parent_id
    attributes = request.attributes
    assert attributes["gen_ai.usage.output_tokens"] == 60 and attributes["gen_ai.usage.input_tokens"] == 11
    assert attributes["gen_ai.response.id"] == answer_id
    assert attributes["gen_ai.response.finish_reasons"] == ("length",) and attributes["gen_ai.request.max_tokens"] == 60
    assert attributes["paceline.num_draft_tokens"] >= attributes["paceline.num_accepted_tokens"] > 0
    assert request.status.status_code is StatusCode.UNSET
    assert set(found) == {"queue", "prefill", "decode"}
    for span in found.values():
        assert span.parent.span_id == request.context.span_id and span.attributes["paceline.choice"] == 0
    moments = [found["queue"].start_time, found["queue"].end_time, found["prefill"].end_time, found["decode"].end_time]
    assert moments == sorted(moments) and before - 5e6 <= moments[0] and moments[-1] <= time.time_ns()
    decode = found["decode"].attributes
    assert decode["paceline.num_draft_tokens"] == attributes["paceline.num_draft_tokens"]
    assert decode["paceline.num_rounds"] < 60


def test_every_choice_has_its_phases():
    with running(tracer=TRACER) as server:
        httpx.post(server.url + "/v1/completions", json=GREEDY | {"prompt": ["a", "b"], "n": 2})
        deadline = time.monotonic() + 10
        while len(EXPORTER.get_finished_spans()) < 13 and time.monotonic() < deadline:
            time.sleep(0.01)
        found = EXPORTER.get_finished_spans()
        EXPORTER.clear()
    assert sorted(span.name for span in found) == ["decode"] * 4 + ["prefill"] * 4 + ["queue"] * 4 + [
        "text_completion bytes"
    ]


def test_requests_that_fail_or_leave():
    slow = SlowBackend(VOCAB_SIZE, num_blocks=2000, context=1)
    with running(slow, tracer=TRACER, options=ServeOptions(request_timeout_seconds=0.2)) as server:
        url = server.url + "/v1/completions"
        assert httpx.post(url, json={"prompt": "x", "max_tokens": 1500}).status_code == 504
        request = spans(4)["text_completion bytes"]
        assert request.status.status_code is StatusCode.ERROR
        assert request.attributes["error.type"] == "RequestTimeoutError"
        with httpx.stream("POST", url, json={"prompt": "x", "max_tokens": 1500, "stream": True}) as stream:
            next(stream.iter_lines())
        server.idle()
        assert spans(4)["text_completion bytes"].attributes["paceline.cancelled"] is True
        assert httpx.post(url, json={"prompt": "x" * 3000}).status_code == 400
        assert spans(1)["text_completion bytes"].attributes["error.type"] == "RequestError"


def test_off_unless_configured(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert tracer_provider() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert tracer_provider() is None


def test_asked_for_and_not_installed(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT") as caught:
        tracer_provider()
    assert "paceline[otel]" in caught.value.hint


def test_spans_are_sent_where_the_environment_says(monkeypatch):
    """To a collector of our own: what arrives is OTLP over HTTP."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    import http.server
    import threading

    received = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    collector = http.server.HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    provider = tracer_provider()
    with provider.get_tracer("test").start_as_current_span("a span of ours"):
        pass
    provider.shutdown()
    collector.shutdown()
    [(path, body)] = received
    assert path == "/v1/traces" and b"a span of ours" in body and b"paceline" in body
