"""The engine's thread, and the async side's way to it. Knows requests and outputs of the runtime; knows no HTTP.

The engine is synchronous and owned by one thread. Commands reach it through a queue that it empties between steps, so a
cancelled request has lost its rows by the next step. Outputs go back to the event loop, one buffer per request: a slow
reader fills its own buffer only, which `max_tokens` bounds, and delays nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from typing import Any, TypeVar

from paceline.errors import EngineDeadError, QueueFullError
from paceline.runtime.engine import Engine
from paceline.runtime.output import SequenceOutput
from paceline.runtime.sequence import Request, SequenceStats

T = TypeVar("T")
RECENT = 256  # finished sequences that statistics are taken over


class Stream:
    """The outputs of some requests as they come, until every choice of each has finished. Close it to cancel them."""

    def __init__(self, worker: EngineWorker, requests: SequenceOf[Request]):
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._buffer: asyncio.Queue[list[SequenceOutput] | Exception] = asyncio.Queue()
        self._unfinished = sum(request.sampling.n for request in requests)
        self.request_ids = [request.request_id for request in requests]

    def deliver(self, item: list[SequenceOutput] | Exception) -> None:
        """Called from the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended: nobody listens
            self._loop.call_soon_threadsafe(self._buffer.put_nowait, item)

    async def __aiter__(self) -> AsyncIterator[SequenceOutput]:
        while self._unfinished:
            item = await self._buffer.get()
            if isinstance(item, Exception):
                raise item
            for output in item:
                self._unfinished -= output.finish_reason is not None
                yield output

    def close(self) -> None:
        """Cancel what has not finished. Harmless at any time, and more than once."""
        self._worker.release(self, cancel=self._unfinished > 0)


class EngineWorker:
    """Runs an engine in a thread. `max_queue` requests may be unfinished beyond those the engine runs at once.

    `failure` is the exception that ended the thread, None while it lives. `on_failure` is called once, from the thread.
    """

    def __init__(self, engine: Engine, max_running: int, max_queue: int):
        self._engine = engine
        self._limit = max_running + max_queue
        self.on_failure: Callable[[], None] = lambda: None
        self._commands: queue.SimpleQueue[tuple[Callable[[Engine], Any], Future] | None] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}  # by request id; changed on the engine's thread only
        self._num_unfinished = 0  # requests accepted and not let go of; changed on the event loop only
        self.recent: deque[tuple[bool, SequenceStats, int]] = deque(maxlen=RECENT)  # speculated, stats, tokens
        self.failure: Exception | None = None
        self._num_tokens: dict[tuple[str, int], int] = {}
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def submit(self, requests: SequenceOf[Request]) -> Stream:
        """Queue requests, all or none. Raises QueueFullError, EngineDeadError, or what the engine refuses them with."""
        if self._num_unfinished + len(requests) > self._limit:
            raise QueueFullError(
                f"{self._num_unfinished} requests are being served or queued, and the limit is {self._limit}",
                hint="try again in a moment, or start the server with a larger `--max-queue`.",
            )
        stream = Stream(self, requests)
        self._num_unfinished += len(requests)
        try:
            await asyncio.shield(asyncio.wrap_future(self._post(lambda engine: self._submit(engine, stream, requests))))
        except BaseException:
            # Refused, or the client left meanwhile: in both cases nothing may stay behind.
            self.release(stream, cancel=True)
            raise
        return stream

    async def call(self, question: Callable[[Engine], T]) -> T:
        """Ask the engine something between two steps."""
        return await asyncio.wrap_future(self._post(question))

    def release(self, stream: Stream, cancel: bool) -> None:
        """The event loop is done with a stream."""
        request_ids, stream.request_ids = stream.request_ids, []
        self._num_unfinished -= len(request_ids)
        if cancel and request_ids and self.failure is None:
            self._post(lambda engine: [self._cancel(engine, request_id) for request_id in request_ids])

    def close(self) -> None:
        """End the thread; unfinished requests are cancelled."""
        self._commands.put(None)
        self._thread.join(timeout=60)

    def _post(self, command: Callable[[Engine], T]) -> Future[T]:
        future: Future[T] = Future()
        if self.failure is not None:
            future.set_exception(_dead(self.failure))
        else:
            self._commands.put((command, future))
        return future

    def _run(self) -> None:
        try:
            while self._obey():
                self._route(self._engine.step())
            for request_id in list(self._streams):
                self._cancel(self._engine, request_id)
        except Exception as error:  # whatever it is, nobody may be left waiting
            self.failure = error
            for stream in set(self._streams.values()):
                stream.deliver(_dead(error))
            self.on_failure()
        self._refuse_the_rest()

    def _obey(self) -> bool:
        """Carry out what is queued; waits for something to do while there is nothing to step. False: close."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_unfinished)
            except queue.Empty:
                return True
            if command is None:
                return False
            question, future = command
            try:
                answer = question(self._engine)
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(answer)

    def _refuse_the_rest(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            if command is not None:
                command[1].set_exception(_dead(self.failure))

    def _submit(self, engine: Engine, stream: Stream, requests: SequenceOf[Request]) -> None:
        for request in requests:
            engine.submit(request)
            self._streams[request.request_id] = stream

    def _cancel(self, engine: Engine, request_id: str) -> None:
        stream = self._streams.pop(request_id, None)
        outputs = engine.cancel(request_id)
        for output in outputs:
            self._num_tokens.pop((request_id, output.index), None)
        if stream is not None and outputs:
            stream.deliver(outputs)

    def _route(self, outputs: SequenceOf[SequenceOutput]) -> None:
        by_request: dict[str, list[SequenceOutput]] = {}
        for output in outputs:
            by_request.setdefault(output.request_id, []).append(output)
            key = (output.request_id, output.index)
            self._num_tokens[key] = self._num_tokens.get(key, 0) + len(output.token_ids)
            if output.finish_reason is not None:
                self.recent.append((output.stats.num_draft_tokens > 0, output.stats, self._num_tokens.pop(key)))
        for request_id, items in by_request.items():
            self._streams[request_id].deliver(items)
            if any(item.finish_reason is not None for item in items) and not self._engine.is_unfinished(request_id):
                del self._streams[request_id]


def _dead(failure: Exception | None) -> EngineDeadError:
    reason = "the server is shutting down" if failure is None else f"{type(failure).__name__}: {failure}"
    return EngineDeadError(f"the engine has stopped: {reason}", hint="see the server's log; restart the server.")
