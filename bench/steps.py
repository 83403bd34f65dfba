"""What one step costs by its rows: ours and llama.cpp's on the same weights, interleaved call by call.

    .venv/bin/paceline build CONFIG -o ENGINE
    .venv/bin/python bench/steps.py ENGINE MODEL.gguf --peer-python PEER/bin/python

MODEL.gguf is what the engine was built from. Prints milliseconds (median, minimum), ratios of medians, and the share of
the memory bandwidth measured in the same run. Writes bench/results/steps-NAME.json with every sample.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from paceline.assemble import open_engine
from paceline.build.autotune import step_seconds, this_machine

ROWS = (1, 2, 4, 8, 16, 32, 64)
PAUSE_SECONDS = 0.25  # OpenMP threads spin for 200 ms after a call: they must not take the next one's cores


class Peer:
    """llama.cpp in a process of its own."""

    def __init__(self, python: str, model: Path, kind: str, num_threads: int, max_context: int):
        worker = Path(__file__).with_name("llama_worker.py")
        command = [python, str(worker), str(model), kind, str(num_threads), str(max_context)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.info = json.loads(self.process.stdout.readline())

    def step(self, rows: int, context: int) -> float:
        self.process.stdin.write(json.dumps({"rows": rows, "context": context}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())["seconds"]


def bandwidth(num_bytes: int = 512 << 20) -> float:
    """Bytes per second of a sum over memory far larger than the caches, the best of a few."""
    block = torch.ones(num_bytes // 8, dtype=torch.int64)
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        block.sum()
        best = min(best, time.perf_counter() - start)
    return num_bytes / best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--kinds", nargs="*", default=["Q8_0", "Q4_0"])
    parser.add_argument("--contexts", nargs="*", type=int, default=[256, 2048])
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    opened = open_engine(arguments.engine, speculation=False)
    threads = opened.manifest.kernels.num_threads
    peers = {
        kind: Peer(arguments.peer_python, arguments.gguf, kind, threads, max(arguments.contexts) + 1024)
        for kind in arguments.kinds
    }
    steppers = {"paceline": lambda n, c: step_seconds(opened.target, n, c)} | {k: p.step for k, p in peers.items()}
    jobs = [(n, context) for context in arguments.contexts for n in ROWS] + [(512, 0)]
    samples: dict[str, list[float]] = {}
    speeds = [bandwidth()]
    for context in dict.fromkeys(c for _, c in jobs):
        for _ in range(arguments.repeats):
            for rows in (n for n, c in jobs if c == context):
                for name, step in steppers.items():
                    time.sleep(PAUSE_SECONDS)
                    samples.setdefault(f"{name}/{rows}/{context}", []).append(step(rows, context))
        speeds.append(bandwidth())
    report(opened, samples, jobs, list(steppers), max(speeds), {k: p.info for k, p in peers.items()})


def report(opened, samples, jobs, names, speed, peers) -> None:
    median = {key: statistics.median(values) * 1e3 for key, values in samples.items()}
    least = {key: min(values) * 1e3 for key, values in samples.items()}
    machine = this_machine()
    # Every step reads each weight once; an untied embedding is only looked up.
    embedding = opened.target._weights.get("embedding.weight")
    moved = opened.manifest.target.weight_bytes - (0 if embedding is None else embedding.numel())
    print(f"machine: {machine.cpu}, {machine.num_cores} cores; model: {opened.manifest.target.source}")
    print(
        f"engine: {opened.manifest.target.quantization}, {moved / 1e6:.0f} MB read per step; "
        f"read speed {speed / 1e9:.1f} GB/s"
    )
    for kind, info in peers.items():
        print(f"llama.cpp {kind}: llama-cpp-python {info['version']}; {info['system']}")
    for context in dict.fromkeys(c for _, c in jobs):
        rows = [n for n, c in jobs if c == context]
        print(f"\ncontext {context}: ms, median (minimum)")
        print("rows".ljust(12) + "".join(f"{n:>16}" for n in rows))
        for name in names:
            cells = (f"{median[f'{name}/{n}/{context}']:.1f} ({least[f'{name}/{n}/{context}']:.1f})" for n in rows)
            print(name.ljust(12) + "".join(f"{cell:>16}" for cell in cells))
        for name in names[1:]:
            ratios = (median[f"{name}/{n}/{context}"] / median[f"paceline/{n}/{context}"] for n in rows)
            print(f"{name} / ours".ljust(12) + "".join(f"{ratio:>15.2f}x" for ratio in ratios))
        if 16 in rows:
            ours = {n: median[f"paceline/{n}/{context}"] for n in rows}
            share = moved / (ours[1] / 1e3) / speed
            print(f"v(16) / v(1) = {ours[16] / ours[1]:.2f}; one row runs at {share:.0%} of the read speed")
    name = opened.manifest.served_model_name.split("/")[-1].removesuffix(".gguf")
    path = Path(__file__).parent / "results" / f"steps-{name}.json"
    path.parent.mkdir(exist_ok=True)
    facts = {"machine": machine.model_dump(), "read_bytes_per_second": speed, "peers": peers, "seconds": samples}
    path.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
