"""A server under abuse for minutes: nothing may be lost, leak or grow.

    .venv/bin/python bench/soak.py ENGINE [--minutes 10] [--clients 8]

Clients do one random thing after another: whole and streamed answers with every feature, answers cancelled at a random
moment, readers slower than the model, bodies that are broken or wrong. Every request must end in an answer or an error
object within its time limit. Prints what was done, resident memory by the minute, and at the end, with nothing running,
whether the engine's books balance. Exit code 1 if anything is amiss.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path

import httpx

from endpoints import Endpoint, free_port, started

TIMEOUT_SECONDS = 240.0
GROWTH = 0.02  # of resident memory, between the middle of the run and its end
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "while", "def", "return", "class", "lambda"]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "on": {"type": "boolean"}},
          "required": ["name", "on"]}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
FEATURES = [
    {}, {}, {"n": 3}, {"logprobs": True, "top_logprobs": 5}, {"seed": 7, "temperature": 1.0}, {"temperature": 0.8},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"tools": [TOOL], "tool_choice": "required"}, {"tools": [TOOL]}, {"stop": ["\n\n", "the"]},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "repetition_penalty": 1.1}, {"logit_bias": {"100": 5}},
    {"prompt_logprobs": 1}, {"cache_salt": "tenant-a"}, {"cache_salt": "tenant-b"}, {"speculation": {"enabled": False}},
    {"speculation": {"num_draft_tokens": 3}}, {"bad_words": ["the", "and"]}, {"return_token_details": True},
    {"min_tokens": 20}, {"top_p": 0.9, "top_k": 40, "min_p": 0.02}, {"priority": -1}, {"ignore_eos": True},
    {"prediction": {"type": "content", "content": "def add(a, b):\n    return a + b\n" * 10}},
]  # fmt: skip
BROKEN = [b"", b"{", b"[" * 5000, b"\xff\xfe", b'{"messages": 5}', b'{"messages": [], "max_tokens": -1}',
          b'{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
          b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
          b'{"messages": [{"role": "user", "content": "x"}], "nonsense": 1}']  # fmt: skip


class Soak:
    def __init__(self, endpoint: Endpoint, seed: int):
        self.endpoint = endpoint
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.lost: list[str] = []

    def prompt(self) -> str:
        if self.random.random() < 0.3:  # one that others share the beginning of
            return "You are asked this by many. " * 20 + self.random.choice(WORDS)
        return " ".join(self.random.choices(WORDS, k=int(self.random.paretovariate(1.2) * 20) % 1500 + 1))

    def body(self) -> dict:
        messages = [{"role": "user", "content": self.prompt()}]
        body = {"messages": messages, "max_tokens": self.random.randint(1, 160), "temperature": 0}
        return body | self.random.choice(FEATURES)

    async def one(self, client: httpx.AsyncClient) -> None:
        actions = (self.whole, self.streamed, self.cancelled, self.cancelled, self.slow, self.broken, self.other)
        action = self.random.choice(actions)
        name = action.__name__
        try:
            await asyncio.wait_for(action(client), TIMEOUT_SECONDS)
            self.done[name] += 1
        except Exception as error:
            self.lost.append(f"{name}: {type(error).__name__}: {error}"[:300])

    async def whole(self, client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/chat/completions", json=self.body())
        self.judge(answer)

    def judge(self, answer: httpx.Response) -> None:
        content = answer.json()
        if answer.status_code == 200:
            assert all(choice["finish_reason"] for choice in content["choices"]), content
        else:
            assert answer.status_code in (400, 415, 429) and content["error"]["message"], (answer.status_code, content)
            self.done[str(answer.status_code)] += 1

    async def streamed(self, client: httpx.AsyncClient, delay: float = 0.0) -> None:
        body = self.body() | {"stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return self.judge(answer)
            last = ""
            async for line in answer.aiter_lines():
                last = line or last
                await asyncio.sleep(delay)
            assert last == "data: [DONE]", last[-300:]

    async def slow(self, client: httpx.AsyncClient) -> None:
        await self.streamed(client, delay=self.random.random() * 0.1)

    async def cancelled(self, client: httpx.AsyncClient) -> None:
        body = self.body() | {"stream": self.random.random() < 0.7}
        task = asyncio.create_task(self.read(client, body))
        await asyncio.sleep(self.random.random() ** 2 * 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def read(self, client: httpx.AsyncClient, body: dict) -> None:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                pass

    async def broken(self, client: httpx.AsyncClient) -> None:
        content = self.random.choice([*BROKEN, self.random.randbytes(self.random.randint(1, 300))])
        headers = {"content-type": self.random.choice(["application/json", "text/plain"])}
        answer = await client.post("/v1/chat/completions", content=content, headers=headers)
        assert answer.status_code in (400, 415), (content, answer.status_code)
        self.judge(answer)

    async def other(self, client: httpx.AsyncClient) -> None:
        kind = self.random.randrange(4)
        if kind == 0:
            answer = await client.post("/v1/responses", json={"input": self.prompt(), "max_output_tokens": 40})
            assert answer.status_code in (200, 400) and answer.json()
        elif kind == 1:
            body = {"prompt": [self.prompt(), self.prompt()], "echo": True, "logprobs": 2, "max_tokens": 8}
            self.judge(await client.post("/v1/completions", json=body))
        elif kind == 2:
            assert (await client.get("/metrics")).status_code == 200
        else:
            assert (await client.get("/stats")).status_code == 200


async def soak(endpoint: Endpoint, minutes: float, num_clients: int) -> bool:
    soaks = [Soak(endpoint, seed) for seed in range(num_clients)]
    end = time.monotonic() + minutes * 60
    memory: list[tuple[float, float]] = []

    async def work(one: Soak) -> None:
        async with httpx.AsyncClient(base_url=endpoint.url, timeout=TIMEOUT_SECONDS) as client:
            while time.monotonic() < end:
                await one.one(client)

    async def watch() -> None:
        while time.monotonic() < end:
            minute = minutes - (end - time.monotonic()) / 60
            memory.append((minute, endpoint.resident_bytes / 1e6))
            done = sum((one.done for one in soaks), Counter())
            lost = sum(len(one.lost) for one in soaks)
            print(f"minute {minute:4.1f}: {memory[-1][1]:.0f} MB, {sum(done.values())} done, {lost} lost", flush=True)
            await asyncio.sleep(min(30, minutes * 6))

    await asyncio.gather(watch(), *(work(one) for one in soaks))
    async with httpx.AsyncClient(base_url=endpoint.url, timeout=60) as client:
        for _ in range(600):
            state = (await client.get("/stats")).json()
            if state["num_requests_running"] + state["num_requests_waiting"] == 0:
                break
            await asyncio.sleep(0.1)
        checked = (await client.get("/check")).json()
    memory.append((minutes, endpoint.resident_bytes / 1e6))
    print("\ndone:", dict(sum((one.done for one in soaks), Counter())))
    lost = [text for one in soaks for text in one.lost]
    print("lost:", len(lost), *lost[:10], sep="\n  ")
    print("idle:", state["num_requests_running"] == 0, "books balance:", checked)
    middle = max(size for minute, size in memory if minute <= minutes / 2)
    growth = memory[-1][1] / middle - 1
    print(f"memory: {memory[0][1]:.0f} MB at the start, {middle:.0f} in the middle, {memory[-1][1]:.0f} at the end "
          f"({growth:+.1%} since the middle)")  # fmt: skip
    return not lost and checked == {"ok": True} and state["num_requests_running"] == 0 and growth <= GROWTH


def serve(engine: str, port: int) -> None:
    """Our server with one route more: the engine's own check of its books."""
    import uvicorn

    from paceline.assemble import open_engine
    from paceline.serve.access import ServeOptions
    from paceline.serve.app import create_app
    from paceline.serve.worker import EngineWorker
    from paceline.serving import served_model

    opened = open_engine(Path(engine))
    worker = EngineWorker(opened.engine, opened.config.build.max_batch_size, 256)
    app = create_app(served_model(opened), worker, ServeOptions())

    @app.get("/check")
    async def check():
        await worker.call(lambda engine: engine.check())
        return {"ok": True}

    uvicorn.run(app, port=port, log_config=None, lifespan="off")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments.engine, arguments.serve)
    port = free_port()
    command = [sys.executable, __file__, arguments.engine, "--serve", str(port)]
    with started("soak", command, port, Path("/tmp/bench-soak.log")) as endpoint:
        fine = asyncio.run(soak(endpoint, arguments.minutes, arguments.clients))
    print("fine" if fine else "NOT fine")
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
