"""The `paceline serve` command as a process: it listens, drains, and says why it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn

from engines import build_tiny
from paceline.errors import ConfigError
from paceline.serving import Address, _Server, listen, read_api_keys

SOURCE = str(Path(__file__).parents[1] / "src")


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    directory, _ = tiny("llama", max_position_embeddings=2048)
    output = tmp_path_factory.mktemp("engines") / "served"
    build_tiny(directory, output, max_seq_len=2000, runtime={"kv_cache_bytes": 64 << 20})
    return output


@contextmanager
def process(*arguments, **environ):
    command = [sys.executable, "-m", "paceline.cli", "serve", *map(str, arguments), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": SOURCE, **environ}
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def url_of(started):
    for line in started.stderr:
        if match := re.search(r"http://[\d.:]+", line):
            return match[0]
    raise AssertionError("the server never said where it listens")


def test_ready_is_said_when_connections_are_accepted():
    """A socket that is bound and does not listen refuses whoever acts on the message."""
    listener = listen(Address(port=0))
    accepted = []

    def connect():
        with socket.create_connection(listener.getsockname(), timeout=5):
            accepted.append(True)
        server.should_exit = True

    async def app(scope, receive, send):
        raise AssertionError("nobody asked")

    server = _Server(uvicorn.Config(app, log_config=None, lifespan="off"), connect)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname(), timeout=5)
    server.run(sockets=[listener])
    assert accepted


def test_sigterm_lets_running_requests_finish(folder):
    with process(folder, "--access-log", "--drain", "60") as started:
        url = url_of(started)
        answers, begun = [], threading.Event()

        def ask():
            body = {"prompt": [5, 6, 7], "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True,
                    "stream_options": {"include_usage": True}}  # fmt: skip
            with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as stream:
                for line in stream.iter_lines():
                    answers.append(line)
                    begun.set()

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(30)
        started.send_signal(signal.SIGTERM)
        asking.join(60)
        lines = [line for line in answers if line]
        assert lines[-1] == "data: [DONE]" and '"completion_tokens":1500' in lines[-2]
        assert started.wait(30) == 128 + signal.SIGTERM
        assert '"path": "/v1/completions", "status": 200' in started.stdout.read()


def test_a_model_is_enough(tiny, tmp_path):
    model, _ = tiny("llama", max_position_embeddings=2048)
    options = ("--set", "build.autotune=false", "--speculation", "off", "--output", tmp_path / "e", "--port", "0")
    with process(model, *options) as started:
        answer = httpx.post(url_of(started) + "/v1/completions", json={"prompt": [5, 6], "max_tokens": 3})
        assert answer.status_code == 200 and answer.json()["usage"]["speculation"]["method"] is None


def test_an_engine_takes_what_may_change_between_starts(folder):
    flags = ("--served-model-name", "other", "--set", "runtime.request_default_max_tokens=5")
    with process(folder, *flags) as started:
        answer = httpx.post(url_of(started) + "/v1/completions", json={"prompt": [5, 6], "ignore_eos": True}).json()
        assert answer["model"] == "other" and answer["usage"]["completion_tokens"] == 5
    with process(folder, "--draft", "a/b") as started:
        assert started.wait(60) == 2
        assert "`speculation.draft` is fixed when an engine is built" in started.stderr.read()


def test_a_taken_port_is_said_at_once(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on `127.0.0.1` port {port}") as caught:
            listen(Address(port=port))
        assert "--port" in caught.value.hint


def test_a_folder_that_is_none_is_refused():
    with process("/nowhere/at/all.yaml") as started:
        assert started.wait(60) == 2 and "error:" in started.stderr.read()


def test_keys_come_from_file_and_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_API_KEY", "from-environment")
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n two \n")
    assert read_api_keys(file) == ("from-environment", "one", "two")
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="has no key"):
        read_api_keys(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_api_keys(tmp_path / "absent")
