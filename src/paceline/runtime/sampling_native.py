"""The sampling kernels in C++ (kernels/sampling.cpp): one pass over a row of logits, rows shared out over threads."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
import torch

from paceline.runtime.backend_native import ThreadPool
from paceline.runtime.sampling import noise_states


def _rows(logits: torch.Tensor) -> tuple[int, int, int, int]:
    """Where the rows of logits are, for the kernels: address, rows, columns, floats from row to row."""
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    return logits.data_ptr(), *logits.shape, logits.stride(0)


class NativeSamplingKernels:
    """runtime.sampling.SamplingKernels over float32 CPU logits; the same noise as TorchSamplingKernels."""

    def __init__(self, pool: ThreadPool):
        self._pool = pool
        self._kernels = pool.kernels

    def argmax(self, logits: torch.Tensor) -> list[int]:
        tokens = np.empty(logits.shape[0], dtype=np.int32)
        self._kernels.paceline_argmax(*_rows(logits), tokens.ctypes.data, self._pool.handle)
        return tokens.tolist()

    def gumbel_argmax(self, logits: torch.Tensor, seed: int, positions: SequenceOf[int]) -> list[int]:
        tokens = np.empty(logits.shape[0], dtype=np.int32)
        states = np.array(noise_states(seed, positions), dtype=np.int64)
        self._kernels.paceline_gumbel_argmax(
            *_rows(logits), states.ctypes.data, tokens.ctypes.data, self._pool.handle
        )
        return tokens.tolist()

    def logprobs(self, logits: torch.Tensor, token_ids: SequenceOf[int]) -> list[float]:
        totals = np.empty(logits.shape[0], dtype=np.float32)
        self._kernels.paceline_logsumexp(*_rows(logits), totals.ctypes.data, self._pool.handle)
        chosen = logits[torch.arange(len(token_ids)), torch.tensor(list(token_ids))].numpy()
        return (chosen - totals).tolist()
