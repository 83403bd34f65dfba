"""Where a round's time goes, phase by phase, beside what the memory would allow.

    .venv/bin/paceline build CONFIG -o ENGINE
    .venv/bin/python bench/profile.py ENGINE

First the forward pass: milliseconds of each phase by rows (medians), for one sequence and for eight, at several
contexts, beside the bytes that the phase must read and how long that takes at the read speed measured in the same run
by the same threads. Then whole rounds of the engine, from its own metrics: the share of scheduling, drafting, verifying
(sampling included) and committing. Prints tables; writes bench/results/profile-NAME.json with every sample.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.assemble import OpenEngine, open_engine
from paceline.build.autotune import read_bytes_per_second, step_seconds, this_machine
from paceline.build.builder import load_weights
from paceline.build.manifest import Manifest, read_manifest
from paceline.runtime.backend_native import BLOCK_SIZE, NativeBackend
from paceline.runtime.backends import ModelWeights, block_bytes, open_backend, open_pool
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.sequence import Request, SpeculationParams

ROWS = (1, 4, 8, 16, 32, 64)
SEQUENCES = (1, 8)
TOTAL = "step"
ROUND_PROMPT = 128
console = Console(highlight=False, width=140)


def open_target(manifest: Manifest, weights: ModelWeights, num_tokens: int) -> NativeBackend:
    """The engine's target alone, with room for `num_tokens` in its cache, all of it written: pages never touched would
    be read from the processor's cache."""
    pool = open_pool(manifest.kernels.compiler, manifest.kernels.num_threads)
    backend = open_backend(
        weights, pool=pool, device="cpu", num_blocks=-(-num_tokens // BLOCK_SIZE), max_rows=ROWS[-1],
        max_seq_len=num_tokens,
    )  # fmt: skip
    for cache in (backend.keys, backend.values):
        cache.fill_(0.01)
    return backend


def phase_bytes(weights: ModelWeights, num_sequences: int, context: int) -> dict[str, int]:
    """What each phase must read from memory at least once, whatever the number of rows."""
    layers = {"qkv": "qkv", "output": "o", "gate_up": "gate_up", "down": "down", "head": "head"}
    size = {phase: 0 for phase in layers}
    for name, tensor in weights.tensors.items():
        for phase, layer in layers.items():
            if f".{layer}." in f".{name}":
                size[phase] += tensor.nbytes
    window = weights.architecture.sliding_windows
    tokens = sum(min(context, w or context) for w in window) / len(window)
    size["attention"] = int(num_sequences * tokens * block_bytes(weights.architecture) / BLOCK_SIZE)
    return size


def measure_steps(backend: NativeBackend, contexts: list[int], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of every phase by "sequences/context/rows", configurations interleaved."""
    samples: dict[str, dict[str, list[float]]] = {}
    for context in contexts:
        for repeat in range(repeats + 1):
            for sequences, rows in ((s, n) for s in SEQUENCES for n in ROWS if n >= s):
                before = backend.profile()
                seconds = step_seconds(backend, rows, context, sequences)
                if repeat == 0:
                    continue
                spent = {phase: total - before[phase] for phase, total in backend.profile().items()}
                key = samples.setdefault(f"{sequences}/{context}/{rows}", {})
                for phase, value in (spent | {TOTAL: seconds}).items():
                    key.setdefault(phase, []).append(value)
    return samples


def show_steps(samples, weights: ModelWeights, speed: float, contexts: list[int]) -> None:
    for sequences in SEQUENCES:
        for context in contexts:
            rows = [n for n in ROWS if n >= sequences]
            table = Table(title=f"{sequences} sequence{'s' * (sequences > 1)}, context {context}: milliseconds by rows")
            for heading in ("phase", "MB", "limit", *map(str, rows)):
                table.add_column(heading, justify="left" if heading == "phase" else "right")
            sizes = phase_bytes(weights, sequences, context)
            sizes[TOTAL] = sum(sizes.values())
            for phase in samples[f"{sequences}/{context}/{rows[0]}"]:
                size = sizes.get(phase, 0)
                limit = (f"{size / 1e6:.1f}", f"{size / speed * 1e3:.2f}") if size else ("", "")
                times = (statistics.median(samples[f"{sequences}/{context}/{n}"][phase]) * 1e3 for n in rows)
                style = "bold" if phase == TOTAL else None
                table.add_row(phase, *limit, *(f"{t:.2f}" for t in times), style=style)
            console.print(table)


def measure_rounds(opened: OpenEngine, batch: int, speculate: bool, max_tokens: int) -> dict[str, float]:
    """Seconds of each phase of the engine's step while `batch` requests decode, per step, prompts left out."""
    engine = opened.engine
    text = Path(__file__).read_text()
    ids = tuple(opened.tokenizer.encode(text).ids)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for index in range(batch):
        prompt = ids[index * 16 : index * 16 + ROUND_PROMPT]
        engine.submit(Request(f"{batch}-{speculate}-{index}", prompt, sampling, SpeculationParams(speculate)))
    prefilled = engine.metrics.generation_tokens + batch
    while engine.metrics.generation_tokens < prefilled:
        engine.step()
    before, steps = dict(engine.metrics.step_phase_seconds), 0
    started = time.perf_counter()
    while engine.num_running == batch:
        engine.step()
        steps += 1
    wall = time.perf_counter() - started
    spent = {phase: total - before[phase] for phase, total in engine.metrics.step_phase_seconds.items()}
    while engine.has_unfinished:
        engine.step()
    return {phase: value / steps for phase, value in spent.items()} | {"outside": (wall - sum(spent.values())) / steps}


def show_rounds(rounds: dict[str, dict[str, float]]) -> None:
    table = Table(title="rounds of the engine: milliseconds, and share of all that is no forward pass")
    phases = list(next(iter(rounds.values())))
    for heading in ("", *phases, "no forward pass"):
        table.add_column(heading, justify="right")
    for name, spent in rounds.items():
        total = sum(spent.values())
        share = 1 - spent["forward"] / total
        table.add_row(name, *(f"{spent[phase] * 1e3:.3f}" for phase in phases), f"{share:.1%}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--contexts", nargs="*", type=int, default=[256, 2048, 8192])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=64, help="of each request of the rounds")
    arguments = parser.parse_args()
    manifest, machine = read_manifest(arguments.engine), this_machine()
    weights = load_weights(arguments.engine, "target", manifest.target, check=False)
    backend = open_target(manifest, weights, SEQUENCES[-1] * (max(arguments.contexts) + ROWS[-1] + BLOCK_SIZE))
    speeds = [read_bytes_per_second(backend.pool)]
    samples = measure_steps(backend, arguments.contexts, arguments.repeats)
    speeds.append(read_bytes_per_second(backend.pool))
    del backend
    console.print(f"{machine.cpu}, {manifest.kernels.num_threads} threads; {manifest.target.source}")
    console.print(
        f"{manifest.target.quantization}; read speed {max(speeds) / 1e9:.1f} GB/s "
        f"(before and after: {speeds[0] / 1e9:.1f}, {speeds[1] / 1e9:.1f})"
    )
    show_steps(samples, weights, max(speeds), arguments.contexts)
    rounds = {}
    for batch in SEQUENCES:
        for speculate in (False, True):
            opened = open_engine(arguments.engine, prefix_cache=False)
            rounds[f"batch {batch}, {opened.manifest.method if speculate else 'plain'}"] = measure_rounds(
                opened, batch, speculate, arguments.max_tokens
            )
    show_rounds(rounds)
    name = manifest.served_model_name.split("/")[-1].removesuffix(".gguf")
    path = Path(__file__).parent / "results" / f"profile-{name}.json"
    path.parent.mkdir(exist_ok=True)
    facts = {"machine": machine.model_dump(), "read_bytes_per_second": speeds, "seconds": samples, "rounds": rounds}
    path.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
