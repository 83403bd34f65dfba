"""Editing files of 100, 200 and 400 lines: with the unedited file as prediction, without it, and llama-server.

    .venv/bin/python bench/edits.py ENGINE --llama-server BINARY --gguf MODEL-Q8_0.gguf MODEL-Q4_0.gguf

The files are the beginnings of modules of Python's standard library; each is to be returned with one name replaced.
Prints decode tokens/s (after the first token), medians over the files, every answer interleaved with the others, and
whether our three ways gave the same text. llama-server runs one process per weights and mode; its answers differ from
ours where its arithmetic does.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import json
import statistics
import sysconfig
from pathlib import Path

import httpx

from endpoints import Endpoint, llama_server, paceline
from paceline.build.autotune import this_machine

MODULES = ("textwrap", "heapq", "configparser", "shlex", "fractions", "difflib", "zipfile/__init__", "argparse")
MODES = ("none", "ngram-simple", "ngram-map-k", "ngram-mod", "ngram-cache")
PAUSE_SECONDS = 0.5


def edits(num_lines: int, count: int) -> list[tuple[str, str]]:
    """(file, instruction) pairs: files of `num_lines` lines, and the name to be replaced."""
    found = []
    for name in MODULES:
        path = Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py"
        text = path.read_text() if path.exists() else ""
        lines = text.splitlines()
        if len(lines) < num_lines:
            continue
        text = "\n".join(lines[:num_lines]) + "\n"
        nodes = ast.walk(ast.parse(path.read_text()))
        defined = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        names = [n for n in defined if text.count(n) >= 2 and len(n) > 4 and not n.startswith("__")]
        if names:
            found.append((text, f"rename `{names[0]}` to `renamed_by_me`"))
    return found[:count]


def prompt_of(text: str, instruction: str) -> str:
    return f"In this file, {instruction}. Return the whole file and nothing else.\n```python\n{text}```"


async def run(ours: Endpoint, peers: list[Endpoint], arguments: argparse.Namespace) -> dict:
    results: dict[str, dict] = {}
    async with httpx.AsyncClient(timeout=900) as client:
        for num_lines in arguments.lines:
            for number, (text, instruction) in enumerate(edits(num_lines, arguments.files)):
                prompt = prompt_of(text, instruction)
                # In a text of its own: the unedited file in the fence the model was shown.
                predicted = {"prediction": {"type": "content", "content": f"```python\n{text}```"}}
                size = httpx.post(ours.url + "/tokenize", json={"prompt": text}).json()["count"]
                ways = {
                    "paceline, plain": (ours, {"speculation": {"enabled": False}}),
                    "paceline, suffix": (ours, {}),
                    "paceline, prediction": (ours, predicted),
                } | {peer.name: (peer, {"cache_prompt": False}) for peer in peers}
                texts = {}
                for name, (endpoint, extra) in ways.items():
                    await asyncio.sleep(PAUSE_SECONDS)
                    if endpoint is ours:
                        extra = {**extra, "cache_salt": f"{name}/{num_lines}/{number}"}
                    sample = await endpoint.chat(client, prompt, int(size * 1.1) + 50, **extra)
                    texts[name] = sample.text
                    row = results.setdefault(f"{num_lines}/{name}", {"rates": [], "tokens": [], "details": []})
                    row["rates"].append(sample.decode_tokens_per_second)
                    row["tokens"].append(sample.num_tokens)
                    row["details"].append(sample.usage.get("completion_tokens_details") or {})
                same = len({texts[name] for name in ways if name.startswith("paceline")}) == 1
                print(f"{num_lines} lines, file {number}: {size} tokens in, ours the same text: {same}", flush=True)
                results.setdefault(f"{num_lines}/same", []).append(same)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--llama-server")
    parser.add_argument("--gguf", nargs="*", default=[])
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--lines", nargs="*", type=int, default=[100, 200, 400])
    parser.add_argument("--files", type=int, default=3)
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(paceline(arguments.engine))
        peers = []
        for gguf in arguments.gguf:
            for mode in arguments.modes:
                name = f"llama-server {Path(gguf).stem.split('-')[-1]} {mode}"
                server = llama_server(arguments.llama_server, gguf, "--spec-type", mode, name=name.replace(" ", "-"),
                                      context=12000)  # fmt: skip
                peers.append(stack.enter_context(server))
                peers[-1].name = name
        results = asyncio.run(run(ours, peers, arguments))
    print(f"\nmachine: {this_machine().cpu}; engine: {arguments.engine}; decode tokens/s, medians")
    names = list(dict.fromkeys(key.partition("/")[2] for key in results if not key.endswith("/same")))
    print("".ljust(32) + "".join(f"{n} lines".rjust(12) for n in arguments.lines))
    for name in names:
        cells = (f"{statistics.median(results[f'{n}/{name}']['rates']):.0f}".rjust(12) for n in arguments.lines)
        print(name.ljust(32) + "".join(cells))
    path = Path(__file__).parent / "results" / "edits.json"
    facts = {"machine": this_machine().cpu, "engine": arguments.engine, "results": results}
    path.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
