"""Hugging Face config.json -> Architecture.

Knows the fields and defaults of each supported family as `transformers` implements them, in the spellings of versions 4
and 5. Knows nothing of tensors, tokenizers or directories.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from paceline.checkpoints.hf_rope import RopeFields, read_rope
from paceline.errors import CheckpointError
from paceline.model.architecture import Architecture

SUPPORTED_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}
_FAMILY_OF_MODEL_TYPE = {
    **{family: family for family in SUPPORTED_ARCHITECTURES.values()},
    "gemma3_text": "gemma3",
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


LayerCount = Annotated[int, Field(gt=0, le=10_000)]  # per-layer tuples follow: a hostile count must not fill the memory


class _Config(BaseModel):
    """Fields every family shares. Sizes have no default: a config without them is broken."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: LayerCount
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    sliding_window: PositiveInt | None = None
    layer_types: tuple[str, ...] | None = None

    def types_of_layers(self) -> tuple[str, ...]:
        return self.layer_types or ("full_attention",) * self.num_hidden_layers

    def family_fields(self) -> dict[str, Any]:
        """What this family adds to, or overrides in, the Architecture."""
        return {}


class _Llama(_Config):
    max_position_embeddings: PositiveInt = 2048
    mlp_bias: bool = False

    def types_of_layers(self) -> tuple[str, ...]:
        return ("full_attention",) * self.num_hidden_layers

    def family_fields(self) -> dict[str, Any]:
        return {"qkv_bias": self.attention_bias, "o_bias": self.attention_bias, "mlp_bias": self.mlp_bias}


class _Mistral(_Config):
    max_position_embeddings: PositiveInt = 131072
    num_key_value_heads: PositiveInt | None = 8
    sliding_window: PositiveInt | None = 4096

    def types_of_layers(self) -> tuple[str, ...]:
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        return (kind,) * self.num_hidden_layers


class _Qwen2(_Config):
    max_position_embeddings: PositiveInt = 32768
    num_key_value_heads: PositiveInt | None = 32
    use_sliding_window: bool = False
    sliding_window: PositiveInt | None = 4096
    max_window_layers: int = 28

    def types_of_layers(self) -> tuple[str, ...]:
        if not self.use_sliding_window or self.sliding_window is None:
            return ("full_attention",) * self.num_hidden_layers
        return self.layer_types or tuple(
            "sliding_attention" if layer >= self.max_window_layers else "full_attention"
            for layer in range(self.num_hidden_layers)
        )

    def family_fields(self) -> dict[str, Any]:
        return {"qkv_bias": True}


class _Qwen3(_Qwen2):
    head_dim: PositiveInt | None = 128

    def family_fields(self) -> dict[str, Any]:
        return {"qkv_bias": self.attention_bias, "o_bias": self.attention_bias, "qk_norm": True}


class _Gemma2(_Config):
    vocab_size: PositiveInt = 256000
    hidden_size: PositiveInt = 2304
    intermediate_size: PositiveInt = 9216
    num_hidden_layers: LayerCount = 26
    num_attention_heads: PositiveInt = 8
    num_key_value_heads: PositiveInt | None = 4
    head_dim: PositiveInt | None = 256
    max_position_embeddings: PositiveInt = 8192
    hidden_activation: str | None = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    sliding_window: PositiveInt | None = 4096
    sliding_window_pattern: PositiveInt = 2
    query_pre_attn_scalar: PositiveFloat = 256
    final_logit_softcapping: PositiveFloat | None = 30.0
    attn_logit_softcapping: PositiveFloat | None = 50.0
    use_bidirectional_attention: bool | None = None

    def types_of_layers(self) -> tuple[str, ...]:
        return self.layer_types or tuple(
            "sliding_attention" if (layer + 1) % self.sliding_window_pattern else "full_attention"
            for layer in range(self.num_hidden_layers)
        )

    def family_fields(self) -> dict[str, Any]:
        return {
            "activation": activation_named(self.hidden_activation or "gelu_pytorch_tanh"),
            "qkv_bias": self.attention_bias,
            "o_bias": self.attention_bias,
            "norm_plus_one": True,
            "post_norms": True,
            "embedding_scale": self.hidden_size**0.5,
            "attention_scale": self.query_pre_attn_scalar**-0.5,
            "attention_softcap": self.attn_logit_softcapping,
            "logits_softcap": self.final_logit_softcapping,
        }


class _Gemma3(_Gemma2):
    vocab_size: PositiveInt = 262208
    max_position_embeddings: PositiveInt = 131072
    sliding_window_pattern: PositiveInt = 6
    final_logit_softcapping: PositiveFloat | None = None
    attn_logit_softcapping: PositiveFloat | None = None

    def family_fields(self) -> dict[str, Any]:
        return {**super().family_fields(), "qk_norm": True}


_SCHEMAS: dict[str, type[_Config]] = {
    "llama": _Llama,
    "qwen2": _Qwen2,
    "qwen3": _Qwen3,
    "mistral": _Mistral,
    "gemma2": _Gemma2,
    "gemma3": _Gemma3,
}


def family_of(config: Mapping[str, Any]) -> str:
    """The family a config.json belongs to; raise CheckpointError for anything we cannot run faithfully."""
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"`quantization_config`: the checkpoint is quantised ({method})",
            "Use the original (bf16, fp16 or float32) checkpoint, or a GGUF file; Paceline quantises by itself.",
        )
    architectures = config.get("architectures") or []
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    family = SUPPORTED_ARCHITECTURES.get(name) if name else _FAMILY_OF_MODEL_TYPE.get(str(config.get("model_type")))
    if family is None:
        remote = " and needs code from its repository, which Paceline never runs" if "auto_map" in config else ""
        raise CheckpointError(
            f"`architectures`: {name or config.get('model_type')!r} is not supported{remote}",
            f"Supported: {', '.join(SUPPORTED_ARCHITECTURES)}.",
        )
    return family


def read_architecture(config: Mapping[str, Any]) -> Architecture:
    """The Architecture that a parsed config.json describes.

    Raises CheckpointError naming the field for unsupported, missing or impossible values.
    """
    family = family_of(config)
    if isinstance(config.get("text_config"), dict):  # Gemma3ForConditionalGeneration: the text model is nested
        config = {"tie_word_embeddings": config.get("tie_word_embeddings", True), **config["text_config"]}
    try:
        schema = _SCHEMAS[family].model_validate(dict(config))
        rope_fields = RopeFields.model_validate(dict(config))
    except ValidationError as error:
        raise CheckpointError(_first_problem(error), "config.json is damaged or not of this family.") from error
    if getattr(schema, "use_bidirectional_attention", None):
        raise CheckpointError("`use_bidirectional_attention`: true is not supported", "Use a text generation model.")
    layer_types = _checked_layer_types(schema)
    head_dim = schema.head_dim or schema.hidden_size // schema.num_attention_heads
    num_kv_heads = schema.num_key_value_heads or schema.num_attention_heads
    check_heads(schema.num_attention_heads, num_kv_heads, head_dim)
    rope = [read_rope(rope_fields, kind, family, schema.max_position_embeddings, head_dim) for kind in layer_types]
    described = {
        "activation": activation_named(schema.hidden_act) if family not in ("gemma2", "gemma3") else "gelu_tanh",
        "attention_scale": head_dim**-0.5,
        **schema.family_fields(),
    }
    return Architecture(
        family=family,
        vocab_size=schema.vocab_size,
        hidden_size=schema.hidden_size,
        intermediate_size=schema.intermediate_size,
        num_layers=schema.num_hidden_layers,
        num_heads=schema.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=schema.max_position_embeddings,
        rms_norm_eps=schema.rms_norm_eps,
        rope_thetas=tuple(theta for theta, _ in rope),
        rope_scalings=tuple(scaling for _, scaling in rope),
        sliding_windows=tuple(schema.sliding_window if kind == "sliding_attention" else None for kind in layer_types),
        tie_word_embeddings=schema.tie_word_embeddings,
        **described,
    )


def check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Raise CheckpointError unless the query heads divide into the key heads and a head can be rotated in pairs."""
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"`num_key_value_heads`: {num_kv_heads} does not divide `num_attention_heads`, {num_heads}",
            "config.json is damaged.",
        )
    if head_dim < 2 or head_dim % 2:
        raise CheckpointError(f"`head_dim`: {head_dim} is not a positive even number", "config.json is damaged.")


def activation_named(name: str) -> str:
    """The Architecture's word for a `transformers` activation."""
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"`hidden_act`: {name!r} is not supported", f"Supported: {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def _checked_layer_types(schema: _Config) -> tuple[str, ...]:
    layer_types = schema.types_of_layers()
    if len(layer_types) != schema.num_hidden_layers:
        raise CheckpointError(
            f"`layer_types`: {len(layer_types)} entries for {schema.num_hidden_layers} layers",
            "config.json is damaged.",
        )
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise CheckpointError(
                f"`layer_types`: {kind!r} is not supported", "Supported: full_attention, sliding_attention."
            )
    return layer_types


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    path = ".".join(str(part) for part in problem["loc"])
    given = "" if problem["type"] == "missing" else f", got {problem['input']!r}"
    return f"`{path}`: {problem['msg'].lower()}{given}"
