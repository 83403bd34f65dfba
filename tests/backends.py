"""Backends over tiny checkpoints for tests: quantise in memory, open by name, run whole prompts."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from paceline.build.compatibility import tokenizer_size
from paceline.build.quantize import activation_group, quantize_model
from paceline.checkpoints.resolve import open_checkpoint
from paceline.kernels.compile import compile_kernels, find_compiler, load_kernels
from paceline.runtime.backend import Backend, StepBatch
from paceline.runtime.backend_native import ThreadPool
from paceline.runtime.backends import ModelWeights, open_backend


@cache
def pool(num_threads: int = 2, compiler: str | None = None, defines: tuple[str, ...] = ()) -> ThreadPool:
    return ThreadPool(load_kernels(compile_kernels(compiler or find_compiler(), defines=defines)), num_threads)


def weights_of(directory, quantization: str = "float32", vocab_size: int | None = None) -> ModelWeights:
    checkpoint = open_checkpoint(str(directory))
    size = vocab_size or tokenizer_size(checkpoint)
    tensors = dict(quantize_model(checkpoint.architecture, checkpoint.tensors, quantization, size))
    return ModelWeights(checkpoint.architecture, tensors, size, activation_group(checkpoint.architecture))


def backend_of(
    weights: ModelWeights,
    name: str,
    *,
    kv_dtype=torch.float32,
    num_blocks: int = 64,
    max_rows: int = 128,
    max_seq_len: int = 256,
    threads: ThreadPool | None = None,
) -> Backend:
    return open_backend(
        weights,
        pool=(threads or pool()) if name == "native" else None,
        device="cpu",
        num_blocks=num_blocks,
        max_rows=max_rows,
        max_seq_len=max_seq_len,
        kv_dtype=kv_dtype,
    )


def batch_of(spans: list[tuple[list[int], int, list[int]]], logits: str = "all") -> StepBatch:
    """A step over (token ids, first position, block table) of each sequence, with logits of all or only last rows."""
    widest = max(len(table) for _, _, table in spans)
    tables = np.zeros((len(spans), widest), np.int32)
    rows, positions, owners, wanted = [], [], [], []
    for index, (tokens, first, table) in enumerate(spans):
        tables[index, : len(table)] = table
        rows += tokens
        positions += range(first, first + len(tokens))
        owners += [index] * len(tokens)
        wanted.append(len(rows) - 1)
    array = lambda values: np.array(values, dtype=np.int32)  # noqa: E731
    return StepBatch(
        array(rows), array(positions), array(owners), tables, array(range(len(rows)) if logits == "all" else wanted)
    )
