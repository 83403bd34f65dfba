"""Real servers on loopback over the fake backend, for tests of the API: a model whose tokens are bytes."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import uvicorn

from fake_engine import TOKENIZER, VOCAB_SIZE, make_engine
from paceline.runtime.backend_fake import FakeBackend
from paceline.serve.access import ServeOptions
from paceline.serve.app import create_app
from paceline.serve.requests import ServedModel
from paceline.serve.worker import EngineWorker
from paceline.serving import Address, listen

TEMPLATE = "{% for m in messages %}{{ m.role[:1] }}:{{ m.content }}\n{% endfor %}a:"


class SlowBackend(FakeBackend):
    """A step takes a while, so that a test can do something during a request."""

    seconds = 0.01

    def forward(self, batch):
        time.sleep(self.seconds)
        return super().forward(batch)


class Running:
    def __init__(self, url, worker, engine):
        self.url, self.worker, self.engine = url, worker, engine

    def idle(self, seconds=10.0):
        """Wait until nothing runs; every KV block must then be accounted for."""
        deadline = time.monotonic() + seconds
        while self.engine.has_unfinished:
            assert time.monotonic() < deadline, "requests are still running"
            time.sleep(0.005)
        self.engine.check()


@contextmanager
def running(
    backend=None, *, drafter=None, max_queue=8, options=None, num_draft_tokens=4, template=TEMPLATE, tracer=None,
    **limits,
):  # fmt: skip
    limits = {"max_seq_len": 2000, "max_batch_size": 4} | limits
    backend = backend or FakeBackend(VOCAB_SIZE, num_blocks=2000, context=1)
    engine = make_engine(backend, drafter=drafter, num_draft_tokens=num_draft_tokens, **limits)
    worker = EngineWorker(engine, limits["max_batch_size"], max_queue)
    method = None if drafter is None else "test"
    model = ServedModel("bytes", TOKENIZER, template, limits["max_seq_len"], method=method, num_draft_tokens=4)
    app = create_app(model, worker, options or ServeOptions(), tracer)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=2))
    worker.on_failure = lambda: None
    listener = listen(Address(port=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield Running(f"http://127.0.0.1:{listener.getsockname()[1]}", worker, engine)
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        worker.close()
        listener.close()
        assert not thread.is_alive()
