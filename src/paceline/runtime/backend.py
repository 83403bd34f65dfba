"""What the runtime needs from a model: run rows, return logits. Knows nothing of sequences, requests or sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


@dataclass(frozen=True)
class StepBatch:
    """The rows of one forward pass, over one or more sequences.

    Rows of a sequence are contiguous with ascending positions. A row's K and V go to slot
    `block_tables[sequence_of_row, position // block_size] * block_size + position % block_size`; it attends to every
    position of its sequence up to and including its own (those of this batch included).
    """

    token_ids: np.ndarray  # int32 [rows]
    positions: np.ndarray  # int32 [rows]
    sequence_of_row: np.ndarray  # int32 [rows], index into block_tables
    block_tables: np.ndarray  # int32 [sequences, max_blocks], unused entries 0
    logit_rows: np.ndarray  # int32 [m], ascending row indices that need logits


class Backend(Protocol):
    """A model with its paged KV cache."""

    vocab_size: int
    num_blocks: int
    block_size: int  # tokens per block
    max_rows: int  # most rows one forward pass takes

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Return float32 logits [len(batch.logit_rows), vocab_size], valid until the next call."""
        ...

    def copy_block(self, source: int, destination: int) -> None:
        """Copy the K and V of one block over another (copy-on-write)."""
        ...
