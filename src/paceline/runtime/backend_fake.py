"""A backend without a model, for tests of everything above it: logits follow from what is stored in its KV slots.

Each slot keeps the token written to it and a hash of all tokens the writer could see, as real K and V depend on their
context. Before logits are returned every slot of the context is read back through the block table and checked, so a
block shared too early, written twice, rolled back wrongly or found under a false prefix fails loudly.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from paceline.runtime.backend import StepBatch

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SCRIPTED_LOGIT = 30.0  # the likeliest other token has at most half of it


class FakeBackend:
    """Logits are a function of the last `context` tokens (None: of all), `seed` and nothing else.

    With a small `context` the greedy output soon repeats itself, which lookup drafters like. `script` maps a prompt to
    the token ids that are by far the likeliest to follow it, one by one; after them, or off that path, logits are
    pseudo-random again. `spread` scales the pseudo-random logits: their standard deviation.
    """

    def __init__(
        self,
        vocab_size: int,
        num_blocks: int,
        block_size: int = 4,
        max_rows: int = 64,
        seed: int = 0,
        context: int | None = None,
        script: Mapping[tuple[int, ...], SequenceOf[int]] | None = None,
        spread: float = 2.0,
    ):
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_rows = max_rows
        self.num_rows_per_call: list[int] = []  # a record of the forward passes, for tests
        self._seed = seed
        self._context = context
        self._script = dict(script or {})
        self._spread = spread
        self._tokens = np.full(num_blocks * block_size, -1, dtype=np.int64)
        self._hashes = np.zeros(num_blocks * block_size, dtype=np.uint64)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        rows = len(batch.token_ids)
        assert 0 < rows <= self.max_rows, f"{rows} rows, at most {self.max_rows} fit"
        assert batch.token_ids.min() >= 0 and batch.token_ids.max() < self.vocab_size, "a token outside the vocabulary"
        self.num_rows_per_call.append(rows)
        slots = [self._slots(batch, row) for row in range(rows)]
        written = [int(row_slots[-1]) for row_slots in slots]
        assert len(set(written)) == rows, "two rows write to one slot"
        with np.errstate(over="ignore"):
            for row, row_slots in enumerate(slots):
                before = self._hashes[row_slots[-2]] if len(row_slots) > 1 else np.uint64(0)
                self._tokens[row_slots[-1]] = batch.token_ids[row]
                self._hashes[row_slots[-1]] = before * _MULTIPLIER + np.uint64(batch.token_ids[row] + 1)
            for row_slots in slots:
                self._check_context(row_slots)
        logits = [self._logits(self._tokens[slots[row]].tolist()) for row in batch.logit_rows]
        return torch.from_numpy(np.array(logits, dtype=np.float32).reshape(len(logits), self.vocab_size))

    def copy_block(self, source: int, destination: int) -> None:
        size = self.block_size
        for array in (self._tokens, self._hashes):
            array[destination * size : (destination + 1) * size] = array[source * size : (source + 1) * size]

    def _slots(self, batch: StepBatch, row: int) -> np.ndarray:
        """The slots of positions 0 to the row's own, as the block table has them."""
        positions = np.arange(batch.positions[row] + 1)
        blocks = batch.block_tables[batch.sequence_of_row[row], positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def _check_context(self, slots: np.ndarray) -> None:
        hashes = self._hashes[slots]
        before = np.concatenate([np.zeros(1, dtype=np.uint64), hashes[:-1]])
        expected = before * _MULTIPLIER + (self._tokens[slots] + 1).astype(np.uint64)
        wrong = np.flatnonzero(hashes != expected)
        assert not len(wrong), f"the KV slot of position {wrong[0]} was computed in another context"

    def _logits(self, token_ids: list[int]) -> np.ndarray:
        """Pseudo-random logits of the token after `token_ids`, normal with deviation `spread`, at most half the
        scripted one's."""
        seen = token_ids if self._context is None else token_ids[-self._context :]
        logits = np.random.default_rng([self._seed, *seen]).standard_normal(self.vocab_size) * self._spread
        np.clip(logits, None, _SCRIPTED_LOGIT / 2, out=logits)
        scripted = self._scripted(token_ids)
        if scripted is not None:
            logits[scripted] = _SCRIPTED_LOGIT
        return logits

    def _scripted(self, token_ids: list[int]) -> int | None:
        for prompt, continuation in self._script.items():
            path = [*prompt, *continuation]
            if len(prompt) <= len(token_ids) < len(path) and path[: len(token_ids)] == token_ids:
                return path[len(token_ids)]
        return None
