"""The decoder in C++: hands packed weights, cache and rows to the compiled kernels. The whole step is one call.

Knows the C structures of kernels/decoder.cpp and the engine's tensor names (build/quantize.py writes them). Knows
nothing of how weights were quantised, nor of requests. Rows are computed independently of each other, so that a row's
logits are the same bits in every batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np
import torch

from paceline.errors import CompatibilityError
from paceline.model.architecture import Architecture
from paceline.model.rope import rope_cos_sin
from paceline.runtime.backend import StepBatch

BLOCK_SIZE = 16
PHASES = ("norm", "qkv", "rope", "attention", "combine", "output", "gate_up", "quantise", "down", "head")
LANES = 16  # outputs per packed block
_FLOAT_KINDS = {torch.bfloat16: 1, torch.float32: 2}
_INT8, _INT4 = 0, 3
_I32, _F32, _PTR = ctypes.c_int32, ctypes.c_float, ctypes.c_void_p


class _Linear(ctypes.Structure):
    _fields_ = [
        *((n, _PTR) for n in ("weight", "scale", "bias")),
        *((n, _I32) for n in ("kind", "in_", "out", "group")),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _Linear) for name in ("qkv", "o", "gate_up", "down")),
        *((name, _PTR) for name in ("attention_norm", "q_norm", "k_norm")),
        *((name, _PTR) for name in ("post_attention_norm", "ffn_norm", "post_ffn_norm", "cosine", "sine")),
        ("window", _I32),
    ]


class _Config(ctypes.Structure):
    _fields_ = [
        *((n, _I32) for n in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim")),
        *((n, _I32) for n in ("vocab", "max_rows", "gelu", "kv_is_float32", "num_blocks")),
        *((n, _F32) for n in ("norm_eps", "attention_scale", "attention_softcap", "logits_softcap", "embedding_scale")),
        *((n, _Linear) for n in ("embedding", "head")),
        *((n, _PTR) for n in ("final_norm", "keys", "values")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((n, _I32) for n in ("num_rows", "num_logits", "max_blocks")),
        *((n, _PTR) for n in ("tokens", "positions", "sequence_of_row", "block_tables", "logit_rows", "logits")),
    ]


class ThreadPool:
    """The kernels' threads, shared by every decoder of an engine so that they never compete for cores."""

    def __init__(self, kernels: ctypes.CDLL, num_threads: int):
        self.kernels = kernels
        self.num_threads = num_threads
        self.handle = kernels.paceline_pool_create(num_threads)

    def __del__(self):
        if getattr(self, "handle", None):
            self.kernels.paceline_pool_destroy(self.handle)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory is taken when it is first written: a KV cache costs what it holds, up to its size."""
    return torch.from_numpy(np.zeros(shape, dtype=np.dtype(f"uint{8 * dtype.itemsize}"))).view(dtype)


def unsupported_reason(architecture: Architecture) -> str | None:
    """Why the kernels cannot run this architecture (None: they can). The PyTorch decoder runs every one."""
    a = architecture
    for name in ("head_dim", "hidden_size", "intermediate_size"):
        if getattr(a, name) % 16:
            return f"{name} is {getattr(a, name)}, not a multiple of 16"
    if a.head_dim > 256:
        return f"head_dim is {a.head_dim}, above 256"
    return None


class NativeBackend:
    """runtime.backend.Backend over the C++ decoder.

    `weights` are the engine's packed tensors (kept alive here, used in place); `max_seq_len` sizes the rope tables;
    `max_rows` is the most rows of one step. K and V are stored as `kv_dtype` (bfloat16 or float32). Raises
    CompatibilityError for shapes the kernels do not take.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Mapping[str, torch.Tensor],
        *,
        vocab_size: int,
        activation_group: int,
        num_blocks: int,
        max_rows: int,
        max_seq_len: int,
        pool: ThreadPool,
        kv_dtype: torch.dtype = torch.bfloat16,
    ):
        if reason := unsupported_reason(architecture):
            raise CompatibilityError(
                f"the native kernels cannot run this model: {reason}", hint="use the torch backend."
            )
        self.architecture = architecture
        self.vocab_size, self.num_blocks, self.block_size, self.max_rows = vocab_size, num_blocks, BLOCK_SIZE, max_rows
        self.pool = pool
        self._kernels = pool.kernels
        self._weights = dict(weights)
        self._group = activation_group
        a = architecture
        cache_shape = (a.num_layers, num_blocks, a.num_kv_heads, a.head_dim * BLOCK_SIZE)
        self.keys, self.values = _lazy_zeros(cache_shape, kv_dtype), _lazy_zeros(cache_shape, kv_dtype)
        self._logits = self._new_logits(min(max_rows, 64))
        self._ropes: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}
        layers = (_Layer * a.num_layers)(*(self._layer(i, max_seq_len) for i in range(a.num_layers)))
        config = self._config(kv_dtype)
        self._handle = self._kernels.paceline_decoder_create(ctypes.byref(config), layers, pool.handle)

    def __del__(self):
        if getattr(self, "_handle", None):
            self._kernels.paceline_decoder_destroy(self._handle)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Run the rows of `batch`; see runtime.backend. The returned tensor is overwritten by the next call."""
        num_logits = len(batch.logit_rows)
        if num_logits > self._logits.shape[0]:
            self._logits = self._new_logits(num_logits)
        arrays = (batch.token_ids, batch.positions, batch.sequence_of_row, batch.block_tables, batch.logit_rows)
        arrays = tuple(np.ascontiguousarray(array, dtype=np.int32) for array in arrays)
        step = _Step(
            len(batch.token_ids),
            num_logits,
            batch.block_tables.shape[1],
            *(array.ctypes.data for array in arrays),
            self._logits.data_ptr(),
        )
        self._kernels.paceline_decoder_forward(self._handle, ctypes.byref(step))
        return self._logits[:num_logits, : self.vocab_size]

    def _new_logits(self, num_rows: int) -> torch.Tensor:
        """Room for logits, every row in whole blocks: the kernels write aligned vectors, the last one past the end."""
        return torch.empty((num_rows, -(-self.vocab_size // LANES) * LANES), dtype=torch.float32)

    def copy_block(self, source: int, destination: int) -> None:
        self.keys[:, destination] = self.keys[:, source]
        self.values[:, destination] = self.values[:, source]

    def profile(self) -> dict[str, float]:
        """Seconds spent in each phase of the step since creation."""
        seconds = (ctypes.c_double * len(PHASES))()
        self._kernels.paceline_decoder_profile(self._handle, seconds)
        return dict(zip(PHASES, seconds, strict=True))

    def _pointer(self, name: str) -> int | None:
        tensor = self._weights.get(name)
        return None if tensor is None else tensor.data_ptr()

    def _linear(self, name: str, num_in: int, num_out: int) -> _Linear:
        weight = self._weights[f"{name}.weight"]
        kind = _FLOAT_KINDS.get(weight.dtype, _INT8 if weight.ndim == 4 else _INT4)
        group = self._group if num_in % self._group == 0 else num_in
        pointers = (self._pointer(f"{name}.{part}") for part in ("weight", "scale", "bias"))
        return _Linear(*pointers, kind, num_in, num_out, group)

    def _layer(self, index: int, max_seq_len: int) -> _Layer:
        a, prefix = self.architecture, f"layers.{index}."
        rope_key = (a.rope_thetas[index], a.rope_scalings[index])
        if rope_key not in self._ropes:
            self._ropes[rope_key] = rope_cos_sin(a, index, max_seq_len)
        cosine, sine = self._ropes[rope_key]
        attention = a.num_heads * a.head_dim
        return _Layer(
            self._linear(prefix + "qkv", a.hidden_size, attention + 2 * a.num_kv_heads * a.head_dim),
            self._linear(prefix + "o", attention, a.hidden_size),
            self._linear(prefix + "gate_up", a.hidden_size, 2 * a.intermediate_size),
            self._linear(prefix + "down", a.intermediate_size, a.hidden_size),
            *(self._pointer(prefix + n) for n in ("attention_norm", "q_norm", "k_norm")),
            *(self._pointer(prefix + n) for n in ("post_attention_norm", "ffn_norm", "post_ffn_norm")),
            cosine.data_ptr(),
            sine.data_ptr(),
            a.sliding_windows[index] or 0,
        )

    def _config(self, kv_dtype: torch.dtype) -> _Config:
        a = self.architecture
        embedding = "embedding" if "embedding.weight" in self._weights else "head"
        return _Config(
            a.num_layers, a.hidden_size, a.intermediate_size, a.num_heads, a.num_kv_heads, a.head_dim,
            self.vocab_size, self.max_rows, a.activation == "gelu_tanh", kv_dtype == torch.float32, self.num_blocks,
            a.rms_norm_eps, a.attention_scale, a.attention_softcap or 0.0, a.logits_softcap or 0.0, a.embedding_scale,
            self._linear(embedding, a.hidden_size, self.vocab_size),
            self._linear("head", a.hidden_size, self.vocab_size),
            self._pointer("final_norm"), self.keys.data_ptr(), self.values.data_ptr(),
        )  # fmt: skip
