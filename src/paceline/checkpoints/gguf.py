"""A GGUF file -> Checkpoint, under Hugging Face names and values.

Knows how llama.cpp's converter renames, permutes and shifts tensors, and its metadata keys. The container is read by
gguf_file, the tokenizer by gguf_tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoints.checkpoint import SAMPLE_BYTES, Checkpoint, LazyTensors, TensorEntry
from paceline.checkpoints.gguf_file import GgufFile, scalar
from paceline.checkpoints.gguf_tokenizer import read_text_settings
from paceline.checkpoints.hf_config import check_heads
from paceline.errors import CheckpointError
from paceline.model.architecture import Architecture, RopeScaling

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")  # Mistral models are "llama" to llama.cpp

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_LAYER_NAMES = {
    **_LAYER_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's scaling, as one divisor per frequency
_LARGEST_GEMMA_LAYERS = {"gemma2": 46, "gemma3": 62}  # the 27B models scale attention by the hidden size


def open_gguf(path: Path, source: str | None = None) -> Checkpoint:
    """The checkpoint in a .gguf file; reads its header and tokenizer, no weights.

    `source` is what the checkpoint calls itself (default: the path). Raises CheckpointError.
    """
    file = GgufFile(path)
    try:
        architecture = _read_architecture(file)
        text = read_text_settings(file.metadata)
    except CheckpointError as error:
        raise CheckpointError(f"`{path}`: {error.message}", error.hint) from error
    return Checkpoint(source or str(path.resolve()), architecture, _lazy_tensors(file, architecture), **vars(text))


def _read_architecture(file: GgufFile) -> Architecture:
    metadata = file.metadata
    family = scalar(metadata, "general.architecture", str)
    if family not in SUPPORTED_ARCHITECTURES:
        raise CheckpointError(
            f"`general.architecture`: {family!r} is not supported", f"Supported: {', '.join(SUPPORTED_ARCHITECTURES)}."
        )
    if scalar(metadata, "split.count", int, 1) > 1:
        raise CheckpointError(
            "the model is split over several files", "Join them: `llama-gguf-split --merge FIRST_PART WHOLE`."
        )
    if scalar(metadata, f"{family}.expert_count", int, 0) > 0:
        raise CheckpointError(f"`{family}.expert_count`: mixtures of experts are not supported", "Use a dense model.")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError("it lacks tensor `token_embd.weight`", "Download this file again.")

    def number(key: str, default: Any = ...) -> Any:
        value = scalar(metadata, f"{family}.{key}", (int, float), default)
        if value is not None and value <= 0:
            raise CheckpointError(f"`{family}.{key}`: {value} is not positive", "Download this file again.")
        return value

    num_layers, hidden_size = number("block_count"), number("embedding_length")
    num_heads = number("attention.head_count")
    num_kv_heads = number("attention.head_count_kv", num_heads)
    head_dim = number("attention.key_length", hidden_size // num_heads)
    check_heads(num_heads, num_kv_heads, head_dim)
    for key in ("attention.value_length", "rope.dimension_count"):
        if number(key, head_dim) != head_dim:
            raise CheckpointError(f"`{family}.{key}`: {number(key)} is not supported", f"Only {head_dim} is.")
    if num_layers > len(file.tensors):
        raise CheckpointError(f"`{family}.block_count`: {num_layers} layers do not fit {len(file.tensors)} tensors")
    windows = _sliding_windows(metadata, family, num_layers, number)
    theta, scaling = number("rope.freq_base", 10_000.0), _rope_scaling(file, family, number)
    local_theta = number("rope.freq_base_swa", 10_000.0)
    is_local = [family == "gemma3" and window is not None for window in windows]
    return Architecture(
        family=family,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=number("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_thetas=tuple(local_theta if local else theta for local in is_local),
        rope_scalings=tuple(None if local else scaling for local in is_local),
        sliding_windows=windows,
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        **_family_fields(family, num_layers, hidden_size, num_heads, head_dim, number),
    )


def _family_fields(
    family: str, num_layers: int, hidden_size: int, num_heads: int, head_dim: int, number: Any
) -> dict[str, Any]:
    if not family.startswith("gemma"):
        return {"qk_norm": family == "qwen3", "attention_scale": head_dim**-0.5}
    is_gemma2 = family == "gemma2"
    is_largest = num_layers == _LARGEST_GEMMA_LAYERS[family]
    return {
        "activation": "gelu_tanh",
        "qk_norm": not is_gemma2,
        "norm_plus_one": True,
        "post_norms": True,
        "embedding_scale": hidden_size**0.5,
        "attention_scale": (hidden_size // num_heads if is_largest else head_dim) ** -0.5,
        "attention_softcap": number("attn_logit_softcapping", 50.0 if is_gemma2 else None),
        "logits_softcap": number("final_logit_softcapping", 30.0 if is_gemma2 else None),
    }


def _sliding_windows(metadata: Mapping[str, Any], family: str, num_layers: int, number: Any) -> tuple[int | None, ...]:
    """Gemma alternates local and global layers; others use one window, if any, everywhere."""
    window = number("attention.sliding_window", 4096 if family == "gemma2" else None)
    key = f"{family}.attention.sliding_window_pattern"
    pattern = metadata.get(key, {"gemma2": 2, "gemma3": 6}.get(family))
    if isinstance(pattern, list):  # one boolean per layer: is it local?
        if len(pattern) != num_layers:
            raise CheckpointError(f"`{key}`: {len(pattern)} entries for {num_layers} layers", "The file is damaged.")
        return tuple(window if local else None for local in pattern)
    if isinstance(pattern, int) and pattern > 0:
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    return (window,) * num_layers


def _rope_scaling(file: GgufFile, family: str, number: Any) -> RopeScaling | None:
    if _ROPE_FACTORS in file.tensors:
        factors = tuple(file.read(_ROPE_FACTORS).float().tolist())
        # Dividing each frequency by its factor is what longrope does when both of its lists are the same.
        return RopeScaling("longrope", 1.0, attention_factor=1.0, short_factor=factors, long_factor=factors,
                           original_max_position_embeddings=number("context_length"))  # fmt: skip
    kind = scalar(file.metadata, f"{family}.rope.scaling.type", str, None)
    factor = number("rope.scaling.factor", number("rope.scale_linear", None))
    if kind == "none" or factor is None or (kind is None and factor == 1.0):
        return None
    if kind in (None, "linear"):
        return RopeScaling("linear", factor)
    if kind != "yarn":
        raise CheckpointError(f"`{family}.rope.scaling.type`: {kind!r} is not supported", "Supported: linear, yarn.")
    attention_factor = number("rope.scaling.attn_factor", number("rope.scaling.yarn_attn_factor", None))
    if attention_factor not in (None, 1.0):
        raise CheckpointError(f"`{family}.rope.scaling.attn_factor`: {attention_factor} is not supported", "Only 1 is.")
    return RopeScaling(
        "yarn",
        factor,
        original_max_position_embeddings=number("rope.scaling.original_context_length", number("context_length")),
        beta_fast=number("rope.scaling.yarn_beta_fast", None),
        beta_slow=number("rope.scaling.yarn_beta_slow", None),
    )


def _lazy_tensors(file: GgufFile, architecture: Architecture) -> LazyTensors:
    entries = {}
    for stored_name, stored in file.tensors.items():
        if stored_name != _ROPE_FACTORS:
            entries[_our_name(stored_name, architecture.family)] = TensorEntry(
                stored.shape,
                stored.encoding.name,
                partial(_read, file, stored_name, architecture),
                partial(file.sample, stored_name, SAMPLE_BYTES),
            )
    return LazyTensors(entries)


def _our_name(stored_name: str, family: str) -> str:
    """Hugging Face's name; what has none keeps its own, and validation will name it."""
    layer_names = _GEMMA_LAYER_NAMES if family.startswith("gemma") else _LAYER_NAMES
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored_name)
    if match is None or match[2] not in layer_names:
        return _TOP_NAMES.get(stored_name, stored_name)
    return f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"


def _read(file: GgufFile, stored_name: str, architecture: Architecture) -> torch.Tensor:
    """One tensor with what llama.cpp's converter did to it undone."""
    tensor = file.read(stored_name)
    if architecture.norm_plus_one and stored_name.endswith("norm.weight"):
        return tensor.float() - 1.0  # the converter adds Gemma's one to the weight
    if architecture.family == "llama" and ".attn_q." in stored_name:
        return _undo_rotary_permutation(tensor, architecture.num_heads)
    if architecture.family == "llama" and ".attn_k." in stored_name:
        return _undo_rotary_permutation(tensor, architecture.num_kv_heads)
    return tensor


def _undo_rotary_permutation(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring rows, Hugging Face rows half a head apart; back to the latter's order."""
    paired = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return paired.swapaxes(1, 2).reshape(tensor.shape)
