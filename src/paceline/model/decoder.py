"""One decoder for Llama, Qwen2, Qwen3, Mistral, Gemma 2 and Gemma 3 (text), in PyTorch.

Runs everywhere: on GPUs in bf16, on CPUs without a compiler, and as the reference of kernels/decoder.cpp. Knows an
architecture and an engine's packed tensors (build/quantize.py names them); knows nothing of files or requests.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.model.architecture import Architecture
from paceline.model.attention import paged_attention
from paceline.model.linear import LANES, Linear
from paceline.model.rope import rope_cos_sin


class Decoder:
    """Weights and arithmetic. The residual stream is float32; linear layers run as their weights are stored.

    `tensors` are packed; `max_seq_len` sizes the rope tables.
    """

    def __init__(
        self,
        architecture: Architecture,
        tensors: Mapping[str, torch.Tensor],
        vocab_size: int,
        activation_group: int,
        max_seq_len: int,
        device: str = "cpu",
    ):
        self.architecture = a = architecture
        self.vocab_size = vocab_size
        self._tensors, self._group, self._device = tensors, activation_group, device
        self._head = self._linear("head", vocab_size)
        self._embedding = self._linear("embedding", vocab_size) if "embedding.weight" in tensors else self._head
        attention = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
        sizes = {"qkv": attention, "o": a.hidden_size, "gate_up": 2 * a.intermediate_size, "down": a.hidden_size}
        self._layers = [
            {name: self._linear(f"layers.{index}.{name}", size) for name, size in sizes.items()}
            for index in range(a.num_layers)
        ]
        self._norms = {
            name: tensor.to(device) for name, tensor in tensors.items() if name.endswith("norm")
        }
        self._tables = [tuple(t.to(device) for t in rope_cos_sin(a, i, max_seq_len)) for i in range(a.num_layers)]
        del self._tensors

    def _linear(self, name: str, num_out: int) -> Linear:
        parts = (self._tensors.get(f"{name}.{part}") for part in ("scale", "bias"))
        return Linear(self._tensors[f"{name}.weight"], num_out, *parts, self._group, self._device)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        spans: list[tuple[int, int, torch.Tensor]],
        logit_rows: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Run rows through every layer, writing K and V, and return float32 logits [len(logit_rows), vocab].

        `tokens`, `positions`, `slots` are int64 [rows] (a slot is block * block_size + offset); `spans` are (first row,
        end row, block table) of each sequence; `keys`, `values` are [layers, blocks, block_size, kv_heads, head_dim].
        """
        x = self._embedding.rows(tokens) * self.architecture.embedding_scale
        for index in range(self.architecture.num_layers):
            x = self._attend(index, x, positions, slots, spans, keys[index], values[index])
            x = self._feed_forward(index, x)
        logits = self._head(self._norm("final_norm", x[logit_rows]))
        cap = self.architecture.logits_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """RMSNorm (arXiv 1910.07467) over the last dimension; the identity where the model has no such norm."""
        if name not in self._norms:
            return x
        inverse = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.architecture.rms_norm_eps)
        return x * inverse * self._norms[name]

    def _attend(
        self,
        index: int,
        x: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        spans: list[tuple[int, int, torch.Tensor]],
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        a, prefix = self.architecture, f"layers.{index}."
        qkv = self._layers[index]["qkv"](self._norm(prefix + "attention_norm", x))
        q, k, v = qkv.view(len(x), -1, a.head_dim).split([a.num_heads, a.num_kv_heads, a.num_kv_heads], dim=1)
        cosine, sine = (table[positions][:, None] for table in self._tables[index])
        q = _rotate(self._norm(prefix + "q_norm", q), cosine, sine)
        k = _rotate(self._norm(prefix + "k_norm", k), cosine, sine)
        keys.view(-1, *keys.shape[2:])[slots] = k.to(keys.dtype)
        values.view(-1, *values.shape[2:])[slots] = v.to(values.dtype)
        mixed = torch.cat([
            paged_attention(
                q[first:end], positions[first:end], keys, values, table,
                scale=a.attention_scale, softcap=a.attention_softcap, window=a.sliding_windows[index],
            )
            for first, end, table in spans
        ])  # fmt: skip
        out = self._layers[index]["o"](mixed.reshape(len(x), -1))
        return x + self._norm(prefix + "post_attention_norm", out)

    def _feed_forward(self, index: int, x: torch.Tensor) -> torch.Tensor:
        prefix, layer = f"layers.{index}.", self._layers[index]
        blocks = layer["gate_up"](self._norm(prefix + "ffn_norm", x)).view(len(x), -1, 2, LANES)
        gate, up = blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)
        functional = torch.nn.functional
        gelu = self.architecture.activation == "gelu_tanh"
        activated = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
        return x + self._norm(prefix + "post_ffn_norm", layer["down"](activated * up))


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (d, d + head_dim / 2) of [rows, heads, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
