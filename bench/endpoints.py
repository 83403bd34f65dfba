"""OpenAI-compatible servers for the benches: started, asked over HTTP, stopped. Knows ours and llama.cpp's.

Every time is taken by the client, where a user would take it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

PACELINE = [sys.executable, "-m", "paceline.cli"]


@dataclass
class Sample:
    """One streamed answer. Times are seconds since the request was sent; `arrivals` are those of pieces of text."""

    text: str = ""
    num_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    seconds: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        return self.arrivals[0] if self.arrivals else self.seconds

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies as a reader sees them: the time between two pieces of text."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def decode_tokens_per_second(self) -> float:
        decode = self.arrivals[-1] - self.arrivals[0] if len(self.arrivals) > 1 else 0.0
        return (self.num_tokens - 1) / decode if decode > 0 else 0.0


@dataclass
class Endpoint:
    name: str
    url: str
    process: subprocess.Popen

    @property
    def resident_bytes(self) -> int:
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def chat(self, client: httpx.AsyncClient, prompt: str, max_tokens: int, **extra: Any) -> Sample:
        """Stream one answer. Raises httpx.HTTPStatusError for a refusal."""
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0,
                "stream": True, "stream_options": {"include_usage": True}, **extra}  # fmt: skip
        sample, started = Sample(), time.perf_counter()
        async with client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event.get("usage"):
                    sample.usage = event["usage"]
                for choice in event.get("choices", ()):
                    if choice["delta"].get("content"):
                        sample.text += choice["delta"]["content"]
                        sample.arrivals.append(time.perf_counter() - started)
        sample.seconds = time.perf_counter() - started
        sample.num_tokens = sample.usage.get("completion_tokens", len(sample.arrivals))
        return sample


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def started(name: str, command: Sequence[str], port: int, log: Path, seconds: float = 300.0) -> Iterator[Endpoint]:
    """Run a server until the block ends, ready when its /health is 200."""
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + seconds
            while True:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{name} did not start:\n{log.read_text()[-2000:]}")
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(url + "/health").status_code == 200:
                        break
                time.sleep(0.2)
            yield Endpoint(name, url, process)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def paceline(engine: str, *options: str, name: str = "paceline"):
    port = free_port()
    command = [*PACELINE, "serve", engine, "--port", str(port), *options]
    return started(name, command, port, Path(f"/tmp/bench-{name}.log"))


def llama_server(binary: str, model: str, *options: str, name: str, slots: int = 1, context: int = 4096):
    """llama.cpp's server without prompt caching between requests, on as many threads as there are cores."""
    port = free_port()
    command = [binary, "-m", model, "--port", str(port), "--host", "127.0.0.1", "-np", str(slots), "-c",
               str(slots * context), "-t", str(os.cpu_count()), "--no-webui", *options]  # fmt: skip
    return started(name, command, port, Path(f"/tmp/bench-{name}.log"))


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of all lie, interpolated as numpy does it."""
    ordered = sorted(values)
    if not ordered:
        return float("nan")
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
