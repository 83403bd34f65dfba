"""Writes tiny GGUF files from `transformers` models, as llama.cpp's convert_hf_to_gguf.py does.

Knows the converter's renaming, permutation and shifting. Knows nothing of Paceline.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType

from tiny_checkpoints import BOS_TOKEN_ID, CHAT_TEMPLATE, EOS_TOKEN_ID, SPECIAL_TOKENS, tiny_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_ARCHITECTURES = {"mistral": "llama"}  # the others keep their name


def write_gguf(
    model, path: Path, quantization: GGMLQuantizationType = GGMLQuantizationType.F32, *, edit=None, tokenizer=None
) -> Path:
    """Write `model` to `path`. Matrices are stored as `quantization`, norms and biases as float32.

    `tokenizer(writer)` writes tokenizer metadata (default: the tiny byte-level BPE); `edit(writer)` adds to all else.
    """
    config = model.config
    family = config.model_type.removesuffix("_text")
    architecture = _ARCHITECTURES.get(family, family)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if family.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    (tokenizer or write_bpe_tokenizer)(writer)
    if edit is not None:
        edit(writer)
    names = gguf.get_tensor_name_map(_architecture_enum(architecture), config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = _as_converted(name, tensor, architecture, config).numpy()
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        kind = quantization if data.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_bpe_tokenizer(writer: gguf.GGUFWriter, pre: str = "gpt-2") -> None:
    """The tiny checkpoints' tokenizer, as metadata."""
    model = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in SPECIAL_TOKENS else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(BOS_TOKEN_ID)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def dequantized(tensor: torch.Tensor, quantization: GGMLQuantizationType) -> torch.Tensor:
    """What is left of a matrix after storing it so."""
    if tensor.dim() == 1 or quantization == GGMLQuantizationType.F32:
        return tensor
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), quantization), quantization))


def _as_converted(name: str, tensor: torch.Tensor, architecture: str, config) -> torch.Tensor:
    if architecture == "llama" and ".q_proj." in name:
        return _permuted(tensor, config.num_attention_heads)
    if architecture == "llama" and ".k_proj." in name:
        return _permuted(tensor, config.num_key_value_heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor


def _permuted(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """LlamaModel.permute of convert_hf_to_gguf.py."""
    weights: np.ndarray = tensor.numpy()
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return torch.from_numpy(np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape)))


def _architecture_enum(name: str) -> gguf.MODEL_ARCH:
    return next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
