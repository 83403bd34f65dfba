"""runtime.backend.Backend over the PyTorch decoder: GPUs, and CPUs without a C++ compiler."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from paceline.model.architecture import Architecture
from paceline.model.decoder import Decoder
from paceline.runtime.backend import StepBatch


class TorchBackend:
    """A decoder with its paged cache on `device`, K and V stored as `kv_dtype`.

    Results are those of PyTorch's own kernels: close for every batch shape, but not the same bits in each.
    """

    def __init__(
        self,
        architecture: Architecture,
        tensors: dict[str, torch.Tensor],
        *,
        vocab_size: int,
        activation_group: int,
        num_blocks: int,
        block_size: int,
        max_rows: int,
        max_seq_len: int,
        device: str = "cpu",
        kv_dtype: torch.dtype = torch.bfloat16,
    ):
        self.vocab_size, self.num_blocks, self.block_size, self.max_rows = vocab_size, num_blocks, block_size, max_rows
        self._device = device
        self._decoder = Decoder(architecture, tensors, vocab_size, activation_group, max_seq_len, device)
        a = architecture
        shape = (a.num_layers, num_blocks, block_size, a.num_kv_heads, a.head_dim)
        self._keys = torch.zeros(shape, dtype=kv_dtype, device=device)
        self._values = torch.zeros(shape, dtype=kv_dtype, device=device)

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Run the rows of `batch`; see runtime.backend."""
        tables = torch.from_numpy(np.asarray(batch.block_tables, dtype=np.int64))
        sequences = np.asarray(batch.sequence_of_row)
        positions = torch.from_numpy(np.asarray(batch.positions, dtype=np.int64))
        blocks = tables[torch.from_numpy(sequences.astype(np.int64)), positions // self.block_size]
        edges = [0, *(np.flatnonzero(np.diff(sequences)) + 1).tolist(), len(sequences)]
        spans = [
            (first, end, tables[int(sequences[first])].to(self._device))
            for first, end in itertools.pairwise(edges)
        ]
        moved = (
            torch.from_numpy(np.asarray(batch.token_ids, dtype=np.int64)),
            positions,
            blocks * self.block_size + positions % self.block_size,
        )
        rows = torch.from_numpy(np.asarray(batch.logit_rows, dtype=np.int64)).to(self._device)
        return self._decoder.forward(*(t.to(self._device) for t in moved), spans, rows, self._keys, self._values)

    def copy_block(self, source: int, destination: int) -> None:
        self._keys[:, destination] = self._keys[:, source]
        self._values[:, destination] = self._values[:, source]
