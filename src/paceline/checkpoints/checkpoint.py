"""What a checkpoint is: an architecture, tensors read one at a time, a tokenizer, a chat template.

Knows the names (Hugging Face Llama style) and shapes an architecture requires, and how a checkpoint is digested and
checked. Knows nothing of file formats or of where a checkpoint came from.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field

import tokenizers
import torch

from paceline.errors import CheckpointError
from paceline.model.architecture import Architecture

SAMPLE_BYTES = 4096  # bytes of each tensor that enter the digest


@dataclass(frozen=True)
class TensorEntry:
    """One stored tensor. `encoding` is the format's own word for how it is stored (BF16, Q4_K, ...)."""

    shape: tuple[int, ...]
    encoding: str
    read: Callable[[], torch.Tensor]  # reads this tensor alone; float32, float16 or bfloat16
    sample: Callable[[], bytes]  # a few stored bytes, cheap to read, for the digest


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors by name. Iteration, length and shapes cost no reading; `tensors[name]` reads that one, each time."""

    def __init__(self, entries: Mapping[str, TensorEntry]):
        self.entries = dict(sorted(entries.items()))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.entries[name].read()

    def __contains__(self, name: object) -> bool:
        return name in self.entries  # Mapping's own would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.entries[name].shape

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(entry.shape) for entry in self.entries.values())

    @property
    def largest_tensor_elements(self) -> int:
        return max(math.prod(entry.shape) for entry in self.entries.values())


@dataclass(frozen=True)
class TextSettings:
    """What turns text into token ids and back, and says when to stop.

    `special_tokens` are the strings chat templates ask for (`bos_token`, `eos_token`, ...). `default_sampling` is what
    the publisher recommends, by OpenAI or vLLM parameter name.
    """

    tokenizer: tokenizers.Tokenizer
    chat_template: str | None
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    special_tokens: Mapping[str, str]
    default_sampling: Mapping[str, float]


@dataclass(frozen=True)
class Checkpoint:
    """A model as published, whatever the format. Validated: `tensors` holds exactly `expected_tensors(architecture)`.

    `source` says where it came from, pinned (hub commit included). `digest` changes when any part does, but not when
    the files only move (sha256; of each tensor only a sample is read). The last fields are those of TextSettings.
    """

    source: str
    architecture: Architecture
    tensors: LazyTensors
    tokenizer: tokenizers.Tokenizer
    chat_template: str | None
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    special_tokens: Mapping[str, str]
    default_sampling: Mapping[str, float]
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        validate_tensors(self.source, self.architecture, self.tensors)
        object.__setattr__(self, "digest", self._compute_digest())

    @property
    def num_parameters(self) -> int:
        """Elements over all tensors; a tied output head counts once."""
        return self.tensors.num_parameters

    @property
    def tokenizer_json(self) -> str:
        return self.tokenizer.to_str()

    def _compute_digest(self) -> str:
        digest = hashlib.sha256()
        described = (
            asdict(self.architecture),
            self.tokenizer_json,
            self.chat_template,
            sorted(self.eos_token_ids),
            self.bos_token_id,
            sorted(self.special_tokens.items()),
            sorted(self.default_sampling.items()),
        )
        digest.update(repr(described).encode())
        for name, entry in self.tensors.entries.items():
            digest.update(f"{name} {entry.encoding} {entry.shape}\n".encode())
            digest.update(entry.sample())
        return digest.hexdigest()


def expected_tensors(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a decoder of this architecture needs. Linear weights are [out, in]."""
    hidden, inner = architecture.hidden_size, architecture.intermediate_size
    queries = architecture.num_heads * architecture.head_dim
    keys = architecture.num_kv_heads * architecture.head_dim
    expected: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (architecture.vocab_size, hidden)}

    def linear(name: str, num_out: int, num_in: int, bias: bool) -> None:
        expected[f"{name}.weight"] = (num_out, num_in)
        if bias:
            expected[f"{name}.bias"] = (num_out,)

    norms = ["input_layernorm", "post_attention_layernorm"]
    if architecture.post_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for layer in range(architecture.num_layers):
        prefix = f"model.layers.{layer}"
        linear(f"{prefix}.self_attn.q_proj", queries, hidden, architecture.qkv_bias)
        linear(f"{prefix}.self_attn.k_proj", keys, hidden, architecture.qkv_bias)
        linear(f"{prefix}.self_attn.v_proj", keys, hidden, architecture.qkv_bias)
        linear(f"{prefix}.self_attn.o_proj", hidden, queries, architecture.o_bias)
        linear(f"{prefix}.mlp.gate_proj", inner, hidden, architecture.mlp_bias)
        linear(f"{prefix}.mlp.up_proj", inner, hidden, architecture.mlp_bias)
        linear(f"{prefix}.mlp.down_proj", hidden, inner, architecture.mlp_bias)
        if architecture.qk_norm:
            expected[f"{prefix}.self_attn.q_norm.weight"] = (architecture.head_dim,)
            expected[f"{prefix}.self_attn.k_norm.weight"] = (architecture.head_dim,)
        expected.update({f"{prefix}.{norm}.weight": (hidden,) for norm in norms})
    expected["model.norm.weight"] = (hidden,)
    if not architecture.tie_word_embeddings:
        expected["lm_head.weight"] = (architecture.vocab_size, hidden)
    return expected


def validate_tensors(source: str, architecture: Architecture, tensors: LazyTensors) -> None:
    """Raise CheckpointError unless `tensors` are exactly those the architecture needs. Reads no tensor."""
    expected = expected_tensors(architecture)
    hint = "The file may be incomplete, or its configuration may belong to another model: download it again."
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise CheckpointError(f"`{source}` lacks {_listed(missing, 'tensor')}", hint)
    unexpected = [name for name in tensors if name not in expected]
    if unexpected:
        raise CheckpointError(
            f"`{source}` holds {_listed(unexpected, 'tensor')} that a {architecture.family} model does not have",
            "Its weights would be ignored, so the output would be wrong. Use a checkpoint of a supported architecture.",
        )
    for name, shape in expected.items():
        if tensors.shape(name) != shape:
            raise CheckpointError(
                f"`{source}`: tensor `{name}` has shape {list(tensors.shape(name))}, expected {list(shape)}", hint
            )


def _listed(names: list[str], noun: str) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:4])
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{len(names)} {noun}{'s' if len(names) > 1 else ''}: {shown}{more}"
