"""What the page shows of a server: its state now, and its recent past in medians. Knows metrics; knows no HTTP."""

from __future__ import annotations

import statistics
from typing import Any

from paceline.runtime.engine import Engine
from paceline.serve.requests import ServedModel
from paceline.serve.worker import EngineWorker


def current_statistics(engine: Engine, worker: EngineWorker, model: ServedModel) -> dict[str, Any]:
    metrics = engine.metrics
    recent = [(speculated, stats, tokens) for speculated, stats, tokens in worker.recent if stats.first_token_at]
    ttft = [(stats.first_token_at - stats.arrived_at) * 1e3 for _, stats, _ in recent]
    decoding = [(s, (stats.last_token_at - stats.first_token_at) / (n - 1)) for s, stats, n in recent if n > 1]
    drafted, accepted = [0] * 64, [0] * 64
    for _, stats, _ in recent:
        for position in range(min(64, len(stats.drafted_per_position))):
            drafted[position] += stats.drafted_per_position[position]
            accepted[position] += stats.accepted_per_position[position]
    steps = metrics.iteration_tokens_total
    return {
        "num_requests_running": metrics.num_requests_running,
        "num_requests_waiting": metrics.num_requests_waiting,
        "kv_cache_usage": round(metrics.kv_cache_usage_perc, 4),
        "rows_per_step": round(steps.sum / steps.count, 2) if steps.count else None,
        "method": model.method,
        "num_draft_tokens": model.num_draft_tokens,
        "acceptance_per_position": [round(a / d, 4) for d, a in zip(drafted, accepted, strict=True) if d],
        "ttft_ms": _percentiles(ttft),
        "itl_ms": _percentiles([seconds * 1e3 for _, seconds in decoding]),
        "tokens_per_second": {
            name: _rate([seconds for speculated, seconds in decoding if speculated == wanted])
            for name, wanted in (("speculated", True), ("plain", False))
        },
    }


def _percentiles(values: list[float]) -> dict[str, float | None]:
    if not values:
        return {"p50": None, "p95": None}
    ordered = sorted(values)
    return {"p50": round(statistics.median(ordered), 3), "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 3)}


def _rate(seconds_per_token: list[float]) -> float | None:
    total = sum(seconds_per_token)
    return round(len(seconds_per_token) / total, 2) if total > 0 else None
