"""Measures this machine: which kernels on how many threads, and what a step costs by its rows.

Every number here is the minimum over interleaved repeats: on a shared machine noise only adds. Knows backends; knows
nothing of files. The costs are the terms of the speedup formula (runtime/speedup.py).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from paceline.build.manifest import Choice, Costs, Kernels, Machine
from paceline.kernels.compile import cpu_features, find_compiler
from paceline.runtime.backend import Backend, StepBatch
from paceline.runtime.backend_native import ThreadPool
from paceline.runtime.backends import ModelWeights, native_reason, open_backend, open_pool
from paceline.runtime.speedup import CostTable, speedup

CONTEXT = 256  # tokens already in the cache while steps are timed
ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 48, 64)
PREFILL = (128, 512)
REPEATS = 5
SECONDS = 20.0  # about how long one model may be timed
BUCKET_STEP = 1.12  # a bucket ends where more rows begin to cost this much more
# What choosing γ assumes before any traffic was seen; `paceline tune` measures it instead.
ASSUMED_ACCEPTANCE = 0.8
MAX_AUTO_DRAFT_TOKENS = 15
MIN_GAIN = 1.05  # predicted speedup below which `method: auto` leaves a draft model unused


def this_machine() -> Machine:
    """The CPU that costs are measured on."""
    features = cpu_features()
    name = next((part[12:] for part in features.split(" | ") if part.startswith("model name: ")), features[:60])
    return Machine(
        fingerprint=hashlib.sha256(features.encode()).hexdigest()[:16], cpu=name.strip(), num_cores=available_cores()
    )


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def step_seconds(backend: Backend, num_rows: int, context: int, num_sequences: int = 1) -> float:
    """Seconds of one forward pass of `num_sequences` sequences, each with an equal share of `num_rows` new tokens after
    `context` cached ones, with logits for each row of a verification and for the last row of a prefill."""
    rows = np.arange(num_rows, dtype=np.int32)
    rows_each = num_rows // num_sequences
    num_blocks = -(-(context + rows_each) // backend.block_size)
    batch = StepBatch(
        token_ids=(rows * 37) % backend.vocab_size,
        positions=rows % rows_each + context,
        sequence_of_row=rows // rows_each,
        block_tables=np.arange(num_sequences * num_blocks, dtype=np.int32).reshape(num_sequences, num_blocks),
        logit_rows=rows if num_rows <= ROWS[-1] else rows[-1:],
    )
    start = time.perf_counter()
    backend.forward(batch)
    return time.perf_counter() - start


def read_bytes_per_second(pool: ThreadPool, num_bytes: int = 512 << 20) -> float:
    """What the memory gives to these threads: a read of far more than the caches hold, the best of a few."""
    memory = torch.ones(num_bytes, dtype=torch.uint8)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        pool.kernels.paceline_read(memory.data_ptr(), num_bytes, pool.handle)
        best = min(best, time.perf_counter() - start)
    return num_bytes / best


def choose_kernels(
    weights: ModelWeights,
    device: str,
    num_threads: int | None,
    measure: bool,
    say: Callable[[str], None],
) -> tuple[Kernels, list[Choice]]:
    """Pick the implementation and thread count for this model on this machine, by a step of 1 and of 16 rows."""
    compiler = find_compiler()
    if reason := native_reason(weights.architecture, device):
        say(f"using the PyTorch kernels: {reason}")
        kernels = Kernels(name="torch", num_threads=min(num_threads or available_cores(), available_cores()))
        torch.set_num_threads(kernels.num_threads)
        return kernels, [Choice(what="kernels", chosen="torch", because=reason)]
    if num_threads and num_threads > available_cores():
        say(f"warning: `build.num_threads` is {num_threads}, and {available_cores()} cores are here: using those.")
        num_threads = available_cores()
    counts = [num_threads] if num_threads else sorted({available_cores(), max(1, available_cores() // 2)})
    if len(counts) == 1 or not measure:
        count = counts[-1]
        because = "set by `build.num_threads`" if num_threads else "the cores available; not measured"
        kernels = Kernels(name="native", num_threads=count, compiler=compiler)
        return kernels, [Choice(what="kernels", chosen=f"native, {count} threads", because=because)]
    backends = {
        count: open_backend(
            weights, pool=open_pool(compiler, count, say), device=device, num_blocks=64, max_rows=16, max_seq_len=1024
        )
        for count in counts
    }
    measured: dict[tuple[int, int], float] = {}
    for _ in range(REPEATS):
        for count, backend in backends.items():
            for rows in (1, 16):
                seconds = step_seconds(backend, rows, CONTEXT)
                measured[count, rows] = min(seconds, measured.get((count, rows), seconds))
    best = min(counts, key=lambda count: measured[count, 1] + measured[count, 16])
    candidates = [
        {"name": "native", "num_threads": c, "v1_ms": measured[c, 1] * 1e3, "v16_ms": measured[c, 16] * 1e3}
        for c in counts
    ]
    because = "; ".join(f"{c['num_threads']} threads: {c['v1_ms']:.1f} / {c['v16_ms']:.1f} ms" for c in candidates)
    kernels = Kernels(name="native", num_threads=best, compiler=compiler, candidates=candidates)
    because = f"step of 1 / 16 rows: {because}"
    return kernels, [Choice(what="kernels", chosen=f"native, {best} threads", because=because)]


def profile(
    target: Backend, draft: Backend | None, max_rows: int, progress: Callable[[int, int], None]
) -> Costs:
    """Time v(n) and prefill of the target and single steps of the draft, interleaved."""
    jobs = [("target", n, CONTEXT) for n in ROWS if n <= max_rows]
    jobs += [("draft", n, CONTEXT) for n in (1, 2, 4, 8) if draft is not None]
    jobs += [("prefill", n, 0) for n in PREFILL if n <= max_rows]
    best: dict[tuple[str, int], float] = {}
    started = time.perf_counter()
    for repeat in range(REPEATS):
        for name, rows, context in jobs:
            seconds = step_seconds(draft if name == "draft" else target, rows, context)
            best[name, rows] = min(seconds, best.get((name, rows), seconds))
        progress(repeat + 1, REPEATS)
        # A large model is timed less often rather than for minutes; the first pass also warms the caches.
        if repeat and time.perf_counter() - started > SECONDS:
            break
    of = {kind: {n: s for (name, n), s in best.items() if name == kind} for kind in ("target", "draft", "prefill")}
    return Costs(context=CONTEXT, target=of["target"], draft=of["draft"], prefill=of["prefill"])


def row_buckets(target_seconds: Mapping[int, float]) -> list[int]:
    """Row counts up to which a step costs about the same: the last n before the cost rises by BUCKET_STEP."""
    sizes = sorted(target_seconds)
    buckets, base = [], target_seconds[sizes[0]]
    for before, size in itertools.pairwise(sizes):
        if target_seconds[size] > base * BUCKET_STEP:
            buckets.append(before)
            base = target_seconds[size]
    return [*buckets, sizes[-1]]


def choose_num_draft_tokens(costs: Costs, method: str) -> tuple[int, float, Choice]:
    """The γ that maximises the speedup formula over the measured costs at ASSUMED_ACCEPTANCE, that speedup, and why."""
    draft_seconds = costs.draft.get(1, 0.0) if method in ("draft", "hybrid") else 0.0
    table = CostTable(costs.target, draft_seconds)
    gains = {g: speedup([ASSUMED_ACCEPTANCE] * g, table) for g in range(1, MAX_AUTO_DRAFT_TOKENS + 1)}
    best = max(gains, key=gains.__getitem__)
    because = (
        f"predicted speedup {gains[best]:.2f} at an assumed acceptance of {ASSUMED_ACCEPTANCE} per token with "
        f"v(1) = {table.step_seconds(1) * 1e3:.1f} ms, v({best + 1}) = {table.step_seconds(best + 1) * 1e3:.1f} ms, "
        f"d = {draft_seconds * 1e3:.1f} ms"
    )
    return best, gains[best], Choice(what="num_draft_tokens", chosen=str(best), because=because)
