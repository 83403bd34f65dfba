"""What a step takes while other programs keep the cores busy: median and 95th percentile, in milliseconds.

    .venv/bin/python bench/neighbour.py ENGINE [--rows 1 8]

Steps of the engine's target run back to back with no, one and two busy loops beside them, in turns. On 2 cores a fair
share of the processor makes a step 1.5 times as long with one neighbour and twice as long with two; what is above that
is waiting of threads for one another. Writes bench/results/neighbour-NAME.json with every sample.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from paceline.assemble import open_engine
from paceline.build.autotune import CONTEXT, step_seconds, this_machine
from paceline.runtime.backend import Backend

SETTLING_SECONDS = 0.6  # the loops start, and the thread pool notices that they are there, or gone


def sample(backend: Backend, rows: int, num_neighbours: int, seconds: float) -> list[float]:
    """Seconds of each step over about `seconds`, beside `num_neighbours` busy loops."""
    loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(num_neighbours)]
    try:
        samples, start = [], time.perf_counter()
        while (now := time.perf_counter()) < start + SETTLING_SECONDS + seconds:
            taken = step_seconds(backend, rows, CONTEXT)
            if now > start + SETTLING_SECONDS:
                samples.append(taken)
        return samples
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--seconds", type=float, default=1.5, help="of each sample")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    opened = open_engine(arguments.engine, speculation=False)
    samples: dict[str, list[float]] = {}
    for _ in range(arguments.repeats):
        for rows in arguments.rows:
            for count in (0, 1, 2):
                samples.setdefault(f"{rows}/{count}", []).extend(
                    sample(opened.target, rows, count, arguments.seconds)
                )
    machine, manifest = this_machine(), opened.manifest
    print(f"{machine.cpu}, {machine.num_cores} cores, {manifest.kernels.num_threads} threads; {manifest.target.source}")
    for rows in arguments.rows:
        quiet = statistics.median(samples[f"{rows}/0"])
        for count in (0, 1, 2):
            taken = sorted(samples[f"{rows}/{count}"])
            median, p95 = statistics.median(taken), taken[int(0.95 * (len(taken) - 1))]
            print(
                f"{rows:>3} rows, {count} neighbours: median {median * 1e3:6.2f} ms, p95 {p95 * 1e3:6.2f} ms, "
                f"{median / quiet:.2f}x and {p95 / quiet:.2f}x the quiet median"
            )
    name = manifest.served_model_name.split("/")[-1].removesuffix(".gguf")
    path = Path(__file__).parent / "results" / f"neighbour-{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": machine.model_dump(), "seconds": samples}))


if __name__ == "__main__":
    main()
