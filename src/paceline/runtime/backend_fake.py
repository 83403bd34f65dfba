"""A backend without a model, for tests: logits are a function of what is really in the KV slots a row may read.

A wrong block table, a missed rollback, a stale prefix or a write to a shared block changes what comes out, as it would
with a model, and every row is independent of its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from paceline.runtime.backend import StepBatch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_DOMINANT = 1000.0


class FakeBackend:
    """runtime.backend.Backend over hashes.

    The slot of a token holds a hash of the token, its position and the slots before it, as the K and V of a deep layer
    do. Logits are pseudo-random (normal, standard deviation `scale`) in a hash of the slots up to the row's own, the
    same for equal `seed`. `successors` maps a token id to the one that surely follows it, to script an output.
    The logits returned are overwritten with NaN by the next call. Breaking the protocol raises AssertionError.
    """

    def __init__(
        self,
        vocab_size: int = 64,
        num_blocks: int = 64,
        block_size: int = 4,
        max_rows: int = 64,
        seed: int = 0,
        scale: float = 2.0,
        successors: Mapping[int, int] | None = None,
    ):
        self.vocab_size, self.num_blocks, self.block_size, self.max_rows = vocab_size, num_blocks, block_size, max_rows
        self.num_rows: list[int] = []  # of each forward pass so far
        self._scale = scale
        self._seed = np.uint64(seed)
        self._successors = dict(successors or {})
        self._slots = np.zeros(num_blocks * block_size, dtype=np.uint64)
        self._vocabulary = np.arange(1, vocab_size + 1, dtype=np.uint64)
        self._logits = torch.empty(0, vocab_size)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self._check(batch)
        self.num_rows.append(len(batch.token_ids))
        states = [self._write(batch, row) for row in range(len(batch.token_ids))]
        self._logits.fill_(float("nan"))
        self._logits = torch.empty(len(batch.logit_rows), self.vocab_size)
        for index, row in enumerate(batch.logit_rows):
            self._logits[index] = self._logits_of(states[row], int(batch.token_ids[row]))
        return self._logits

    def copy_block(self, source: int, destination: int) -> None:
        size = self.block_size
        self._slots[destination * size : (destination + 1) * size] = self._slots[source * size : (source + 1) * size]

    def _write(self, batch: StepBatch, row: int) -> np.uint64:
        """Fill the row's slot; a hash of all slots it attends to, its own included."""
        position = int(batch.positions[row])
        block_table = batch.block_tables[batch.sequence_of_row[row]]
        places = np.arange(position + 1)
        slots = block_table[places // self.block_size] * self.block_size + places % self.block_size
        with np.errstate(over="ignore"):
            before = _mix(self._slots[slots[:-1]] * _GOLDEN + places[:-1].astype(np.uint64)).sum(dtype=np.uint64)
            token = np.uint64(int(batch.token_ids[row]) + 1)
            self._slots[slots[-1]] = state = _mix(_mix(before + np.uint64(position)) + token * _GOLDEN)
        return state

    def _logits_of(self, state: np.uint64, token_id: int) -> torch.Tensor:
        with np.errstate(over="ignore"):
            bits = _mix(_mix(state + self._seed * _GOLDEN) + self._vocabulary * _GOLDEN)
        halves = np.stack([bits >> np.uint64(40), (bits >> np.uint64(8)) & np.uint64(0xFFFFFF)])
        radius, angle = (halves.astype(np.float64) + 0.5) * 2.0**-24
        logits = self._scale * np.sqrt(-2.0 * np.log(radius)) * np.cos(2.0 * np.pi * angle)  # Box-Muller
        if token_id in self._successors:
            logits[self._successors[token_id]] = _DOMINANT
        return torch.from_numpy(logits.astype(np.float32))

    def _check(self, batch: StepBatch) -> None:
        num_rows = len(batch.token_ids)
        assert 0 < num_rows <= self.max_rows, f"{num_rows} rows"
        assert len(batch.positions) == len(batch.sequence_of_row) == num_rows
        for array in (batch.token_ids, batch.positions, batch.sequence_of_row, batch.block_tables, batch.logit_rows):
            assert array.dtype == np.int32
        assert batch.token_ids.min() >= 0 and batch.token_ids.max() < self.vocab_size, "token id outside the vocabulary"
        assert batch.block_tables.min() >= 0 and batch.block_tables.max() < self.num_blocks, "no such block"
        assert batch.positions.max() < batch.block_tables.shape[1] * self.block_size, "position past the block table"
        assert (np.diff(batch.sequence_of_row) >= 0).all(), "a sequence's rows are not contiguous"
        same = np.diff(batch.sequence_of_row) == 0
        assert (np.diff(batch.positions)[same] == 1).all(), "a sequence's positions are not ascending"
        assert (np.diff(batch.logit_rows) > 0).all(), "logit rows are not ascending"
        owners: dict[int, int] = {}
        for position, sequence in zip(batch.positions, batch.sequence_of_row, strict=True):
            block = int(batch.block_tables[sequence][position // self.block_size])
            assert owners.setdefault(block, int(sequence)) == int(sequence), "two sequences write to one block"


def _mix(z: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser, elementwise on uint64."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
