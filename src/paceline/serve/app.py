"""The HTTP routes. Knows paths, status codes and how an answer travels; what is asked and answered is read and spelt
elsewhere (`requests.py`, `answers.py`)."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from paceline.errors import PacelineError, RequestTimeoutError
from paceline.serve.access import Access, ServeOptions
from paceline.serve.answers import Answer, Event
from paceline.serve.chat_answers import ChatAnswer
from paceline.serve.chat_requests import chat_job
from paceline.serve.completion_answers import CompletionAnswer
from paceline.serve.completion_requests import completion_job
from paceline.serve.openai_types import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from paceline.serve.problems import AsciiJSONResponse, error_body, error_response, on_error, on_surprise
from paceline.serve.prometheus import CONTENT_TYPE, exposition
from paceline.serve.requests import Job, ServedModel, check_model
from paceline.serve.response_answers import ResponseAnswer
from paceline.serve.response_requests import response_job
from paceline.serve.response_types import ResponseRequest
from paceline.serve.statistics import current_statistics
from paceline.serve.tracing import RequestTrace
from paceline.serve.worker import EngineWorker, Stream

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

PAGE = Path(__file__).parent / "page"
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class _EventResponse(StreamingResponse):
    """Server-sent events. The stream is closed whatever happens, even if the client left before the first event."""

    def __init__(self, served: _Served, headers: dict[str, str]):
        super().__init__(_events(served), media_type="text/event-stream", headers=headers)
        self._served = served

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            served = self._served
            served.stream.close()
            served.trace.end(served.answer.id, served.answer.used, asyncio.CancelledError())  # if it has not ended yet


@dataclass(frozen=True)
class _Served:
    """One body on its way: the job, its stream and what to make of it."""

    job: Job
    stream: Stream
    answer: Answer
    deadline: float | None
    trace: RequestTrace


def create_app(
    model: ServedModel, worker: EngineWorker, options: ServeOptions, tracer: Tracer | None = None
) -> FastAPI:
    """The API over an engine that runs in `worker`. The app owns neither: closing them is the caller's. With a `tracer`
    every request leaves spans."""
    app = FastAPI(title="Paceline", summary="OpenAI-compatible completions with speculative decoding.",
                  docs_url=None, redoc_url=None, default_response_class=AsciiJSONResponse)  # fmt: skip
    for kind in (PacelineError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, on_error)
    app.add_exception_handler(Exception, on_surprise)
    _add_information(app, model, worker)
    _add_generation(app, model, worker, options, tracer)
    if options.page and (PAGE / "index.html").is_file():
        _add_page(app)
    if options.cors_origins:
        app.add_middleware(CORSMiddleware, allow_origins=list(options.cors_origins), allow_methods=["GET", "POST"],
                           allow_headers=["*"], expose_headers=["x-paceline-speculation", "x-request-id"])  # fmt: skip
    app.add_middleware(Access, options=options, respond=error_response)
    return app


def _add_information(app: FastAPI, model: ServedModel, worker: EngineWorker) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def models() -> Any:
        entry = {"id": model.name, "object": "model", "created": created, "owned_by": "paceline"}
        return {"object": "list", "data": [entry | {"max_model_len": model.max_seq_len}]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Any:
        if name != model.name:
            raise HTTPException(404, f"the model {name[:100]!r} is not served here; `{model.name}` is")
        return {"id": model.name, "object": "model", "created": created, "owned_by": "paceline"}

    @app.get("/health")
    async def health() -> Any:
        """The process answers. Whether it can serve is `/ready`."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Any:
        if worker.failure is not None:
            raise HTTPException(503, f"the engine has stopped: {type(worker.failure).__name__}: {worker.failure}")
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Response:
        families = await worker.call(lambda engine: copy.deepcopy(list(engine.metrics.families())))
        return Response(exposition(families), media_type=CONTENT_TYPE)

    @app.get("/stats")
    async def stats() -> Any:
        """What the page shows: the state now, and the recent past."""
        return await worker.call(lambda engine: current_statistics(engine, worker, model))

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Any:
        check_model(body.model, model)
        ids = model.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens).ids
        return {"tokens": ids, "count": len(ids), "max_model_len": model.max_seq_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Any:
        check_model(body.model, model)
        return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}


def _add_generation(
    app: FastAPI, model: ServedModel, worker: EngineWorker, options: ServeOptions, tracer: Tracer | None
) -> None:
    @app.post("/v1/chat/completions")
    async def chat(body: ChatCompletionRequest, request: Request) -> Response:
        job = chat_job(body, model)
        return await serve(job, ChatAnswer(job, model), body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        job = completion_job(body, model)
        return await serve(job, CompletionAnswer(job, model), body, request)

    @app.post("/v1/responses")
    async def responses(body: ResponseRequest, request: Request) -> Response:
        job = response_job(body, model)
        return await serve(job, ResponseAnswer(job, model, body), body, request)

    @app.api_route("/v1/responses/{response_id:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
    async def stored_response(response_id: str) -> Response:
        message = "no response is stored here: `store` is false for all of them, whatever the request says"
        raise HTTPException(404, message)

    async def serve(job: Job, answer: Answer, body: Any, request: Request) -> Response:
        operation = "text_completion" if isinstance(answer, CompletionAnswer) else "chat"
        trace = RequestTrace(tracer, operation, request.headers, job, model)
        try:
            await _compile_grammar(worker, job)
            stream = await worker.submit(job.requests)
        except BaseException as error:
            trace.end(answer.id, answer.used, error)
            raise
        seconds = options.request_timeout_seconds
        deadline = None if seconds is None else time.monotonic() + seconds
        served = _Served(job, stream, answer, deadline, trace)
        headers = {"x-request-id": answer.id}
        if body.stream:
            headers |= {"cache-control": "no-store", "x-accel-buffering": "no"}
            return _EventResponse(served, headers)
        await _whole(served, request)
        whole = answer.body()
        headers["x-paceline-speculation"] = json.dumps(whole["usage"]["speculation"], separators=(",", ":"))
        return AsciiJSONResponse(whole, headers=headers)


def _add_page(app: FastAPI) -> None:
    headers = {"content-security-policy": PAGE_POLICY, "x-content-type-options": "nosniff"}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response((PAGE / "index.html").read_bytes(), media_type="text/html", headers=headers)

    app.mount("/page", StaticFiles(directory=PAGE), name="page")


async def _compile_grammar(worker: EngineWorker, job: Job) -> None:
    """In a thread of its own, so that nobody's tokens wait for it; submitting then finds it compiled."""
    spec = job.requests[0].sampling.grammar
    if spec is not None:
        grammars = await worker.call(lambda engine: engine.grammars)
        await asyncio.to_thread(grammars.matcher, spec)


async def _outputs(served: _Served) -> AsyncIterator[list[Event]]:
    """The events of each output. Whatever ends the iteration, the requests are over then."""
    outputs, ended_by = aiter(served.stream), None
    try:
        while True:
            try:
                left = None if served.deadline is None else max(0.0, served.deadline - time.monotonic())
                output = await asyncio.wait_for(anext(outputs), left)
            except StopAsyncIteration:
                return
            except asyncio.TimeoutError as error:
                raise RequestTimeoutError(
                    "the request took longer than this server allows",
                    hint="ask for fewer tokens, or start the server with a larger `--request-timeout`.",
                ) from error
            yield served.answer.add(output)
    except BaseException as error:
        ended_by = error
        raise
    finally:
        served.stream.close()
        served.trace.end(served.answer.id, served.answer.used, ended_by)


async def _whole(served: _Served, request: Request) -> None:
    """Wait for the end, or for the client to leave."""

    async def consume() -> None:
        async for _ in _outputs(served):
            pass

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    work, leave = asyncio.create_task(consume()), asyncio.create_task(disconnected())
    try:
        await asyncio.wait((work, leave), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise HTTPException(499, "the client closed the connection")
        await work
    finally:
        for task in (work, leave):
            task.cancel()
        await asyncio.gather(work, leave, return_exceptions=True)
        served.stream.close()


async def _events(served: _Served) -> AsyncIterator[str]:
    answer = served.answer
    try:
        for event in answer.begin():
            yield _event(event)
        async for events in _outputs(served):
            for event in events:
                yield _event(event)
        for event in answer.end():
            yield _event(event)
        if answer.ends_with_done:
            yield "data: [DONE]\n\n"
    except PacelineError as error:  # the status line has been sent: an event must say it
        told = answer.fail(error) or [(None, error_body(error.http_status, error.message, error.hint, None))]
        for event in told:
            yield _event(event)


def _event(event: Event) -> str:
    name, data = event
    line = "" if name is None else f"event: {name}\n"
    return f"{line}data: {json.dumps(data, separators=(',', ':'))}\n\n"
