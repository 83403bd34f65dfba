"""From a checkpoint's tensors to an engine's: fused, quantised, packed, one at a time.

The only home of the engine's tensor names. Knows the Hugging Face names it reads and the packed layout it writes
(model/linear.py); knows nothing of files.

Engine tensors: `head`, `embedding` (absent when tied to the head), `layers.N.{qkv,o,gate_up,down}` with `.weight`,
`.scale` (int8 only) and `.bias` (where the model has one); norms `layers.N.attention_norm`, ... and `final_norm`,
float32, with Gemma's 1 + weight applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch

from paceline.errors import CheckpointError
from paceline.model.architecture import Architecture
from paceline.model.linear import LANES, pack_float, pack_int8, quantize_weight

ROWS_AT_ONCE = 4096  # rows of a weight in float32 at a time: bounds the memory of quantising a large vocabulary
# Relative error of int8 weights above which a layer keeps bf16. Per-channel int8 of trained layers stays near 0.01.
MAX_WEIGHT_ERROR = 0.04

_NORMS = {
    "attention_norm": "input_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
}


def activation_group(architecture: Architecture, wanted: int = 32) -> int:
    """Inputs that share one activation scale: the largest divisor of every layer's input size up to `wanted`.

    One outlier spoils a group's other inputs. KL to float32 on HumanEval with groups of 128, 64 and 32: SmolLM2-135M
    0.030, 0.008, 0.006; Qwen2.5-Coder-0.5B (64, 32) 0.0016, 0.0010. Up to 16 rows smaller groups cost nothing
    (memory decides), at 64 rows 32 costs 8 % more than 64.
    """
    a = architecture
    sizes = math.gcd(a.hidden_size, a.intermediate_size, a.num_heads * a.head_dim)
    return max(size for size in range(4, wanted + 1, 4) if sizes % size == 0)


def quantize_model(
    architecture: Architecture,
    tensors: Mapping[str, torch.Tensor],
    quantization: str,
    vocab_size: int,
    note: Callable[[str, float], None] = lambda name, error: None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the engine's (name, tensor) pairs. `quantization` is int8, bf16 or float32.

    The vocabulary is cut to `vocab_size` rows: padding beyond the tokenizer means nothing and costs time. `note(name,
    error)` hears of each int8 layer's relative weight error, and of layers kept in bf16 for exceeding the bound. Raises
    CheckpointError for weights that are not finite.
    """
    a = architecture
    tied = a.tie_word_embeddings
    yield from _linear("head", [tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]], [], quantization,
                       note, rows=vocab_size)  # fmt: skip
    if not tied:
        yield from _linear("embedding", [tensors["model.embed_tokens.weight"]], [], quantization, note, rows=vocab_size)
    yield "final_norm", _norm(a, tensors["model.norm.weight"])
    for index in range(a.num_layers):
        source, target = f"model.layers.{index}.", f"layers.{index}."
        for name, theirs in _norm_names(a).items():
            yield target + name, _norm(a, tensors[f"{source}{theirs}.weight"])
        qkv = [f"{source}self_attn.{part}_proj" for part in "qkv"]
        groups = {"qkv": qkv, "o": [source + "self_attn.o_proj"], "down": [source + "mlp.down_proj"]}
        for name, parts in groups.items():
            weights = [tensors[f"{part}.weight"] for part in parts]
            biases = [tensors[f"{part}.bias"] for part in parts if f"{part}.bias" in tensors]
            yield from _linear(target + name, weights, biases, quantization, note)
        gate_up = [f"{source}mlp.{part}_proj" for part in ("gate", "up")]
        weight = _alternate(*(tensors[f"{part}.weight"] for part in gate_up))
        biases = [_alternate(*(tensors[f"{part}.bias"] for part in gate_up))] if a.mlp_bias else []
        yield from _linear(target + "gate_up", [weight], biases, quantization, note)


def _norm_names(architecture: Architecture) -> dict[str, str]:
    names = {name: theirs for name, theirs in _NORMS.items() if architecture.qk_norm or "self_attn" not in theirs}
    if architecture.post_norms:
        return names | {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffn_norm": "post_feedforward_layernorm",
        }
    return names | {"ffn_norm": "post_attention_layernorm"}


def _norm(architecture: Architecture, weight: torch.Tensor) -> torch.Tensor:
    weight = weight.float()
    return weight + 1.0 if architecture.norm_plus_one else weight.clone()


def _alternate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Sixteen rows of gate, sixteen of up, and so on: the kernel multiplies neighbours while they are in registers."""
    rest = gate.shape[1:]
    return torch.stack((gate.view(-1, LANES, *rest), up.view(-1, LANES, *rest)), dim=1).reshape(-1, *rest)


def _linear(
    name: str,
    weights: list[torch.Tensor],
    biases: list[torch.Tensor],
    quantization: str,
    note: Callable[[str, float], None],
    rows: int | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    weight = weight[:rows]
    if quantization == "int8":
        quantised, scale, error = _quantize_in_pieces(weight)
        if not math.isfinite(error):
            raise CheckpointError(
                f"the weights of `{name}` are not finite numbers", hint="the checkpoint is damaged: fetch it again."
            )
        note(name, error)
        if error <= MAX_WEIGHT_ERROR:
            yield f"{name}.weight", pack_int8(quantised)
            yield f"{name}.scale", _pad(scale)
        else:
            yield f"{name}.weight", pack_float(weight.to(torch.bfloat16))
    else:
        yield f"{name}.weight", pack_float(weight.to(torch.bfloat16 if quantization == "bf16" else torch.float32))
    if biases:
        yield f"{name}.bias", _pad(torch.cat(biases).float())


def _pad(vector: torch.Tensor) -> torch.Tensor:
    """To whole blocks of outputs, which the kernels load at once."""
    return torch.nn.functional.pad(vector.contiguous(), (0, -len(vector) % LANES))


def _quantize_in_pieces(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """int8 values [out, in], float32 scales [out] and the whole's relative error, a few rows in float32 at once."""
    quantised = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0], dtype=torch.float32)
    lost = kept = 0.0
    for first in range(0, weight.shape[0], ROWS_AT_ONCE):
        piece = weight[first : first + ROWS_AT_ONCE].float()
        q, scale = quantize_weight(piece)
        quantised[first : first + len(piece)], scales[first : first + len(piece)] = q, scale
        lost += float((piece - q.float() * scale[:, None]).square().sum())
        kept += float(piece.square().sum())
    return quantised, scales, math.sqrt(lost / kept) if kept else 0.0
