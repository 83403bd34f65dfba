"""What a decoder looks like, in numbers. Knows nothing of weights, files or devices."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RopeScaling:
    """Rotary scaling. `kind` is one of linear, dynamic, llama3, yarn, longrope; the rest as Hugging Face spells it."""

    kind: str
    factor: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Architecture:
    """One decoder-only transformer of the Llama, Qwen2, Qwen3, Mistral, Gemma 2 or Gemma 3 (text) family.

    Sizes are counts of elements. `sliding_windows` has one entry per layer: None, or the number of positions a token
    sees, itself included. `rope_thetas` and `rope_scalings` are per layer too (Gemma 3's local layers differ).
    """

    family: str  # "llama" | "qwen2" | "qwen3" | "mistral" | "gemma2" | "gemma3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_thetas: tuple[float, ...]
    rope_scalings: tuple[RopeScaling | None, ...]
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    activation: str = "silu"  # "silu" | "gelu_tanh"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_plus_one: bool = False  # Gemma multiplies by 1 + weight
    post_norms: bool = False  # Gemma normalises the outputs of attention and feed-forward too
    embedding_scale: float = 1.0  # Gemma: sqrt(hidden_size)
    attention_scale: float = field(default=0.0)  # multiplies q·k; never 0 in a valid instance
    attention_softcap: float | None = None
    logits_softcap: float | None = None
