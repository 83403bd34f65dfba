"""From an engine's packed weights to a backend, by name. Knows every backend; knows nothing of files or config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from paceline.errors import DeviceError
from paceline.kernels.compile import compile_kernels, find_compiler, load_kernels
from paceline.model.architecture import Architecture
from paceline.runtime.backend import Backend
from paceline.runtime.backend_native import BLOCK_SIZE, NativeBackend, ThreadPool, unsupported_reason
from paceline.runtime.backend_torch import TorchBackend


@dataclass(frozen=True)
class ModelWeights:
    """One model of an engine: its shape and its packed tensors (build/quantize.py names them)."""

    architecture: Architecture
    tensors: Mapping[str, torch.Tensor]
    vocab_size: int
    activation_group: int


def open_pool(compiler: str | None, num_threads: int, say=lambda message: None) -> ThreadPool | None:
    """Compile (or find compiled) kernels and start their threads; None where there is no compiler."""
    compiler = compiler or find_compiler()
    if compiler is None:
        return None
    return ThreadPool(load_kernels(compile_kernels(compiler, say)), num_threads)


def native_reason(architecture: Architecture, device: str) -> str | None:
    """Why the native kernels cannot be used (None: they can)."""
    if device != "cpu":
        return f"device is {device}"
    if find_compiler() is None:
        return "no C++ compiler was found (install g++ or clang, or set CXX)"
    return unsupported_reason(architecture)


def block_bytes(architecture: Architecture, kv_dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of K and V of one block of one model."""
    a = architecture
    return 2 * a.num_layers * a.num_kv_heads * a.head_dim * BLOCK_SIZE * kv_dtype.itemsize


def open_backend(
    weights: ModelWeights,
    *,
    pool: ThreadPool | None,
    device: str,
    num_blocks: int,
    max_rows: int,
    max_seq_len: int,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> Backend:
    """The native backend where there is a pool for it, else the PyTorch one."""
    common = {"vocab_size": weights.vocab_size, "activation_group": weights.activation_group}
    sizes = common | {"num_blocks": num_blocks, "max_rows": max_rows, "max_seq_len": max_seq_len, "kv_dtype": kv_dtype}
    if pool is not None:
        return NativeBackend(weights.architecture, weights.tensors, pool=pool, **sizes)
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "`device: cuda`, but PyTorch sees no NVIDIA GPU",
            hint="use `device: cpu`, or install a CUDA build of torch.",
        )
    return TorchBackend(weights.architecture, weights.tensors, device=device, block_size=BLOCK_SIZE, **sizes)
