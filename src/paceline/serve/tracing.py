"""OpenTelemetry spans of requests: how long each waited, read its prompt and decoded, and what speculation did for it.

Off unless the environment says where spans go (`OTEL_EXPORTER_OTLP_ENDPOINT`). Names are those of OpenTelemetry's
conventions for generative AI, ours are under `paceline.`. Knows finished requests; knows nothing of HTTP but headers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import paceline
from paceline.errors import ConfigError
from paceline.runtime.sequence import SequenceStats
from paceline.serve.answers import Usage
from paceline.serve.requests import Job, ServedModel

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def tracer_provider() -> TracerProvider | None:
    """A provider that sends spans where the environment says, in the background; None if it says nothing.

    The SDK reads the rest of its variables itself (`OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, headers, time limits).
    Raises ConfigError if the variable is set and the packages are not here. Shutting it down sends what is left.
    """
    set_by = next((name for name in _ENDPOINTS if os.environ.get(name)), None)
    if set_by is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"`{set_by}` asks for traces, and OpenTelemetry is not installed",
            hint="pip install 'paceline[otel]', or unset the variable.",
        ) from error
    name = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "paceline")}
    provider = TracerProvider(resource=Resource.create(name | {"service.version": paceline.__version__}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class RequestTrace:
    """One request from its arrival to its end. Without a tracer it does nothing."""

    def __init__(self, tracer: Tracer | None, operation: str, headers: Mapping[str, str], job: Job, model: ServedModel):
        self._span = None
        if tracer is None:
            return
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        sampling = job.requests[0].sampling
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "paceline",
            "gen_ai.request.model": model.name,
            "gen_ai.response.model": model.name,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.seed": sampling.seed,
            "gen_ai.request.choice.count": sampling.n,
        }
        self._tracer = tracer
        self._span = tracer.start_span(
            f"{operation} {model.name}", extract(headers), SpanKind.SERVER,
            {name: value for name, value in attributes.items() if value is not None},
        )  # fmt: skip

    def end(self, response_id: str, used: Usage, error: BaseException | None = None) -> None:
        """The request is over. `error` is what ended it, if anything did; a client that left is no error of ours."""
        if self._span is None:
            return
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        span, self._span = self._span, None
        report = used.speculation()
        span.set_attribute("gen_ai.response.id", response_id)
        span.set_attribute("gen_ai.usage.input_tokens", used.num_prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", used.num_tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", used.num_cached_tokens)
        reasons = [stats.finish_reason for stats in used.stats.values() if stats.finish_reason is not None]
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        for name in ("method", "num_draft_tokens", "num_accepted_tokens", "acceptance_length", "num_rounds"):
            if report[name] is not None:
                span.set_attribute(f"paceline.{name}", report[name])
        if isinstance(error, Exception):
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        elif error is not None:
            span.set_attribute("paceline.cancelled", True)
        context = set_span_in_context(span)
        for (_, index), stats in used.stats.items():
            self._add_phases(context, index, stats)
        span.end()

    def _add_phases(self, context: Any, choice: int, stats: SequenceStats) -> None:
        """Queue, prefill and decode of one choice, as far as it got."""
        draft = {
            "paceline.num_draft_tokens": stats.num_draft_tokens,
            "paceline.num_accepted_tokens": stats.num_accepted_tokens,
            "paceline.num_rounds": stats.num_rounds,
        }
        cached = {"paceline.cached_tokens": stats.num_cached_tokens}
        phases = (
            ("queue", stats.arrived_at, stats.first_scheduled_at, {}),
            ("prefill", stats.first_scheduled_at, stats.first_token_at, cached),
            ("decode", stats.first_token_at, stats.last_token_at, draft),
        )
        for name, start, end, attributes in phases:
            if start is None or end is None:
                break
            attributes = {"paceline.choice": choice, **attributes}
            span = self._tracer.start_span(name, context, attributes=attributes, start_time=_wall(start))
            span.end(_wall(end))


def _wall(at: float) -> int:
    """Nanoseconds since 1970 of a `time.perf_counter()` of this process."""
    return time.time_ns() - int((time.perf_counter() - at) * 1e9)
