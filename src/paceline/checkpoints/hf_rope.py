"""Rotary embedding settings of a Hugging Face config.json, per layer type.

Knows both spellings (`rope_theta` and `rope_scaling` of transformers 4, `rope_parameters` of 5, which Gemma 3 nests by
layer type) and what each rotary kind requires. Computes no frequencies.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt

from paceline.errors import CheckpointError
from paceline.model.architecture import RopeScaling

DEFAULT_THETA = 10_000.0
GEMMA3_GLOBAL_THETA = 1_000_000.0
_LAYER_TYPES = ("full_attention", "sliding_attention")


class RopeParameters(BaseModel):
    """One `rope_scaling` or `rope_parameters` dictionary."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rope_type: str | None = None
    type: str | None = None  # the name of rope_type before transformers 4.45
    rope_theta: PositiveFloat | None = None
    factor: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None
    attention_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factor: tuple[PositiveFloat, ...] | None = None
    long_factor: tuple[PositiveFloat, ...] | None = None
    partial_rotary_factor: float | None = None
    truncate: bool = True

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


class RopeFields(BaseModel):
    """The top-level fields of config.json that concern rotary embedding."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    rope_theta: PositiveFloat | None = None
    rope_local_base_freq: PositiveFloat | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: PositiveInt | None = None
    partial_rotary_factor: float | None = None


def read_rope(
    fields: RopeFields, layer_type: str, family: str, max_position_embeddings: int, head_dim: int
) -> tuple[float, RopeScaling | None]:
    """Base and scaling for layers of `layer_type`. Raises CheckpointError, or pydantic's error for a wrong type."""
    if family == "gemma3":
        parameters = _gemma3_parameters(fields, layer_type)
        default_theta = (
            fields.rope_local_base_freq or DEFAULT_THETA
            if layer_type == "sliding_attention"
            else fields.rope_theta or GEMMA3_GLOBAL_THETA
        )
    else:
        given = fields.rope_scaling or fields.rope_parameters or {}
        nested = any(kind in given for kind in _LAYER_TYPES)
        parameters = RopeParameters.model_validate((given.get(layer_type) or {}) if nested else given)
        default_theta = fields.rope_theta or DEFAULT_THETA
    partial = parameters.partial_rotary_factor or fields.partial_rotary_factor or 1.0
    if partial != 1.0:
        raise CheckpointError(f"`partial_rotary_factor`: {partial} is not supported", "Only 1.0 is.")
    scaling = _scaling(parameters, fields.original_max_position_embeddings, max_position_embeddings, head_dim)
    return parameters.rope_theta or default_theta, scaling


def _gemma3_parameters(fields: RopeFields, layer_type: str) -> RopeParameters:
    given = dict((fields.rope_parameters or {}).get(layer_type) or {})
    if layer_type == "full_attention":  # the old spelling scales the global layers only
        given.update(fields.rope_scaling or {})
    return RopeParameters.model_validate(given)


def _scaling(
    parameters: RopeParameters, pretrained_length: int | None, max_position_embeddings: int, head_dim: int
) -> RopeScaling | None:
    kind = parameters.kind
    if kind == "default":
        return None
    required = {
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "yarn": (),
        "longrope": ("short_factor", "long_factor"),
    }
    if kind not in required:
        raise CheckpointError(f"`rope_type`: {kind!r} is not supported", f"Supported: default, {', '.join(required)}.")
    for name in required[kind]:
        if getattr(parameters, name) is None:
            raise CheckpointError(f"`rope_scaling.{name}`: missing, {kind} needs it", "config.json is damaged.")
    for name in ("short_factor", "long_factor"):
        factors = getattr(parameters, name)
        if factors is not None and len(factors) != head_dim // 2:
            raise CheckpointError(f"`rope_scaling.{name}`: {len(factors)} values, expected {head_dim // 2}")
    if not parameters.truncate:
        raise CheckpointError("`rope_scaling.truncate`: false is not supported", "Only true is.")
    original = None
    factor = parameters.factor
    if kind in ("llama3", "yarn", "longrope"):
        original = pretrained_length or parameters.original_max_position_embeddings or max_position_embeddings
        factor = factor or max_position_embeddings / original
    return RopeScaling(
        kind=kind,
        factor=factor,
        low_freq_factor=parameters.low_freq_factor,
        high_freq_factor=parameters.high_freq_factor,
        original_max_position_embeddings=original,
        attention_factor=parameters.attention_factor,
        beta_fast=parameters.beta_fast,
        beta_slow=parameters.beta_slow,
        mscale=parameters.mscale,
        mscale_all_dim=parameters.mscale_all_dim,
        short_factor=parameters.short_factor,
        long_factor=parameters.long_factor,
    )
