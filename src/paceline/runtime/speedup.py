"""The one formula of speculation: expected tokens per round over the cost of a round.

Pure arithmetic over measured times and acceptance rates. Knows nothing of who measures them or who decides.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import accumulate
from operator import mul


def survival(acceptance_rates: SequenceOf[float]) -> list[float]:
    """S_k = the product of the first k rates: the probability that draft token k is accepted at all.

    `acceptance_rates[i]` is the probability that draft token i is accepted given that those before it were.
    """
    return list(accumulate(acceptance_rates, mul))


def expected_tokens(acceptance_rates: SequenceOf[float]) -> float:
    """E = 1 + Σ S_k: expected tokens per round, the recovered or bonus token included. For a constant rate α this is
    (1 - α^(γ+1)) / (1 - α) (Leviathan, Kalman and Matias, arXiv 2211.17192)."""
    return 1.0 + math.fsum(survival(acceptance_rates))


@dataclass(frozen=True)
class CostTable:
    """Measured seconds: one target step by its number of rows, one draft step, and the rest of a round.

    `target_seconds` maps rows to seconds and needs at least one entry; entries are positive. `draft_seconds` is 0 for
    drafters that run no model. ValueError otherwise.
    """

    target_seconds: Mapping[int, float]
    draft_seconds: float = 0.0
    overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.target_seconds:
            raise ValueError("target_seconds needs at least one measurement")
        for rows, seconds in self.target_seconds.items():
            if rows < 1 or not (0.0 < seconds < math.inf):
                raise ValueError(f"target_seconds must map rows >= 1 to positive seconds, got {rows!r}: {seconds!r}")
        for name in ("draft_seconds", "overhead_seconds"):
            if not (0.0 <= getattr(self, name) < math.inf):
                raise ValueError(f"{name} must be finite and not negative, got {getattr(self, name)!r}")

    def step_seconds(self, num_rows: int) -> float:
        """v(n): linear between measurements, the nearest one below the range. Above it, in proportion to rows: past
        the largest measured batch a step is taken to be bound by arithmetic."""
        measured = sorted(self.target_seconds)
        if num_rows >= measured[-1]:
            return self.target_seconds[measured[-1]] * num_rows / measured[-1]
        index = bisect.bisect_right(measured, num_rows)
        if index == 0:
            return self.target_seconds[measured[0]]
        low, high = measured[index - 1], measured[index]
        fraction = (num_rows - low) / (high - low)
        return self.target_seconds[low] * (1.0 - fraction) + self.target_seconds[high] * fraction

    def round_seconds(self, num_draft_tokens: int) -> float:
        """γ·d + v(γ+1) + overhead: one round of one sequence that drafts γ = `num_draft_tokens` tokens."""
        return num_draft_tokens * self.draft_seconds + self.step_seconds(num_draft_tokens + 1) + self.overhead_seconds


def cheapest_num_rows(costs: CostTable, tolerance: float = 0.05) -> int:
    """The fewest rows of a step whose seconds a row are within `tolerance` of the least measured: where nearly every
    draft token is accepted, more of them in a round bring nothing but longer rounds."""
    per_row = {rows: seconds / rows for rows, seconds in costs.target_seconds.items()}
    return min(rows for rows, seconds in per_row.items() if seconds <= min(per_row.values()) * (1.0 + tolerance))


def speedup(acceptance_rates: SequenceOf[float], costs: CostTable) -> float:
    """E(γ) · v(1) / (γ·d + v(γ+1) + overhead), γ = len(acceptance_rates): how many times faster than plain decoding."""
    return expected_tokens(acceptance_rates) * costs.step_seconds(1) / costs.round_seconds(len(acceptance_rates))
