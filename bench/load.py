"""One endpoint under 1 to 16 clients: speculation on and off, and llama-server on the same weights and prompts.

    .venv/bin/python bench/load.py ENGINE --llama-server BINARY --gguf MODEL-Q8_0.gguf [--modes none ngram-mod]

Prompts are HumanEval and MT-Bench in turn, greedy, none seen before by the server that gets it (ours: a cache salt a
run; llama-server: prompt caching off). At each number of clients every endpoint gets the same requests, endpoint by
endpoint, all of it repeated. Prints aggregate tokens/s (all tokens over the wall time of a run), and TTFT and ITL (time
between two pieces of text as they arrive) at p50, p95 and p99.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import time
from itertools import chain
from pathlib import Path
from typing import Any

import httpx

from endpoints import Endpoint, Sample, llama_server, paceline, percentile
from paceline.build.autotune import this_machine
from prompts import prompt_sets

PAUSE_SECONDS = 1.0


async def run_clients(
    endpoint: Endpoint, prompts: list[str], num_clients: int, max_tokens: int, extra: dict[str, Any]
) -> tuple[list[Sample], float]:
    """Ask all prompts, `num_clients` at a time; the samples and the wall seconds of it all."""
    queue = list(reversed(prompts))
    samples: list[Sample] = []
    async with httpx.AsyncClient(timeout=900, limits=httpx.Limits(max_connections=64)) as client:

        async def work() -> None:
            while queue:
                samples.append(await endpoint.chat(client, queue.pop(), max_tokens, **extra))

        started = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(num_clients)))
        return samples, time.perf_counter() - started


async def run(ways: dict[str, tuple[Endpoint, dict]], prompts: list[str], arguments: argparse.Namespace) -> dict:
    results: dict[str, dict] = {}
    for repeat in range(arguments.repeats):
        for num_clients in arguments.clients:
            some = prompts[: max(arguments.requests, 2 * num_clients)]
            for name, (endpoint, extra) in ways.items():
                await asyncio.sleep(PAUSE_SECONDS)
                if endpoint.name == "paceline":
                    extra = {**extra, "cache_salt": f"{name}/{num_clients}/{repeat}"}
                samples, seconds = await run_clients(endpoint, some, num_clients, arguments.max_tokens, extra)
                row = results.setdefault(f"{num_clients}/{name}", {"rates": [], "ttft": [], "itl": [], "rss": []})
                row["rates"].append(sum(sample.num_tokens for sample in samples) / seconds)
                row["ttft"] += [sample.ttft * 1e3 for sample in samples]
                row["itl"] += [gap * 1e3 for sample in samples for gap in sample.gaps]
                row["rss"].append(endpoint.resident_bytes)
                print(f"{repeat} {num_clients:>2} clients, {name}: {row['rates'][-1]:.1f} tokens/s", flush=True)
    return results


def report(results: dict, clients: list[int], names: list[str]) -> None:
    for title, values in (("TTFT, ms", "ttft"), ("ITL, ms", "itl")):
        print(f"\n{title}: p50 / p95 / p99")
        print("".ljust(28) + "".join(f"{n} clients".rjust(22) for n in clients))
        for name in names:
            cells = []
            for n in clients:
                found = results[f"{n}/{name}"][values]
                cells.append(" / ".join(f"{percentile(found, share):.0f}" for share in (0.5, 0.95, 0.99)).rjust(22))
            print(name.ljust(28) + "".join(cells))
    print("\naggregate tokens/s, medians")
    print("".ljust(28) + "".join(f"{n} clients".rjust(12) for n in clients))
    for name in names:
        cells = (f"{statistics.median(results[f'{n}/{name}']['rates']):.1f}".rjust(12) for n in clients)
        print(name.ljust(28) + "".join(cells))
    for name in names:
        print(f"resident memory of {name}: {max(results[f'{n}/{name}']['rss'][-1] for n in clients) / 1e6:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--llama-server")
    parser.add_argument("--gguf", nargs="*", default=[])
    parser.add_argument("--modes", nargs="*", default=["none", "ngram-mod"], help="llama-server's --spec-type")
    parser.add_argument("--clients", nargs="*", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=8, help="at least, and two a client")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    arguments = parser.parse_args()
    sets = prompt_sets(arguments.data, 40)
    sets.pop("code edit", None)
    prompts = list(chain.from_iterable(zip(*sets.values(), strict=False)))
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(paceline(arguments.engine))
        ways: dict[str, tuple[Endpoint, dict]] = {
            "paceline": (ours, {}), "paceline, plain": (ours, {"speculation": {"enabled": False}})
        }  # fmt: skip
        for gguf in arguments.gguf:
            for mode in arguments.modes:
                name = f"llama-server {Path(gguf).stem.split('-')[-1]} {mode}"
                server = llama_server(arguments.llama_server, gguf, "--spec-type", mode, name=name.replace(" ", "-"),
                                      slots=max(arguments.clients), context=2048)  # fmt: skip
                ways[name] = (stack.enter_context(server), {"cache_prompt": False})
        results = asyncio.run(run(ways, prompts, arguments))
    print(f"\nmachine: {this_machine().cpu}, {this_machine().num_cores} cores; engine: {arguments.engine}")
    report(results, arguments.clients, list(ways))
    path = Path(__file__).parent / "results" / "load.json"
    facts = {"machine": this_machine().cpu, "engine": arguments.engine, "results": results}
    path.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
