"""Rotary position embedding: frequencies of every scaling method, and the cosines and sines of an engine.

Methods as `transformers` 5 computes them (modeling_rope_utils). Two of them depend there on how long the request has
grown (dynamic, longrope), so that a token's vector would depend on what follows it. Here the engine's `max_seq_len`
decides once: results never depend on the request. Knows nothing of weights or caches.

Layout: dimension d is rotated with d + head_dim / 2 (the halves of GPT-NeoX and Hugging Face, not neighbours).
"""

from __future__ import annotations

import math

import torch

from paceline.errors import CheckpointError
from paceline.model.architecture import Architecture, RopeScaling


def rope_tables(architecture: Architecture, layer: int, max_seq_len: int) -> tuple[torch.Tensor, float]:
    """(inverse frequencies float32 [head_dim / 2], factor that multiplies cosines and sines) of a layer.

    Raises CheckpointError where the checkpoint's rope settings give no finite frequencies.
    """
    theta, scaling = architecture.rope_thetas[layer], architecture.rope_scalings[layer]
    try:
        frequencies, attention_factor = _scaled(architecture, theta, scaling, max_seq_len)
    except (ArithmeticError, ValueError) as error:
        raise _impossible(theta, scaling) from error
    if not (frequencies.isfinite().all() and math.isfinite(attention_factor)):
        raise _impossible(theta, scaling)
    return frequencies, attention_factor


def rope_cos_sin(architecture: Architecture, layer: int, max_seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions 0 to max_seq_len - 1: float32 [max_seq_len, head_dim / 2] each.

    Angles are rounded to float32, as where the models were trained.
    """
    frequencies, attention_factor = rope_tables(architecture, layer, max_seq_len)
    angles = torch.arange(max_seq_len, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def _impossible(theta: float, scaling: RopeScaling | None) -> CheckpointError:
    return CheckpointError(
        f"`rope_theta` {theta} with `rope_scaling` {scaling} gives no finite frequencies",
        hint="config.json is damaged; compare it with the original.",
    )


def _scaled(
    architecture: Architecture, theta: float, scaling: RopeScaling | None, max_seq_len: int
) -> tuple[torch.Tensor, float]:
    dim = architecture.head_dim
    if scaling is None:
        return _plain(theta, dim), 1.0
    if scaling.kind == "linear":
        return _plain(theta, dim) / scaling.factor, 1.0
    if scaling.kind == "dynamic":
        return _dynamic(theta, dim, scaling.factor, architecture.max_position_embeddings, max_seq_len), 1.0
    if scaling.kind == "llama3":
        return _llama3(_plain(theta, dim), scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(theta, dim, scaling), _yarn_attention_factor(scaling)
    if scaling.kind == "longrope":
        return _longrope(theta, dim, scaling, max_seq_len), _longrope_attention_factor(scaling)
    raise CheckpointError(
        f"`rope_type`: {scaling.kind!r} is not supported", hint="Supported: linear, dynamic, llama3, yarn, longrope."
    )


def _wavelengths_over_two_pi(theta: float, dim: int) -> torch.Tensor:
    return theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _plain(theta: float, dim: int) -> torch.Tensor:
    return 1.0 / _wavelengths_over_two_pi(theta, dim)


def _dynamic(theta: float, dim: int, factor: float, trained_length: int, max_seq_len: int) -> torch.Tensor:
    """NTK-aware scaling of theta for the engine's length; nothing within the trained length."""
    length = max(max_seq_len, trained_length)
    growth = factor * length / trained_length - (factor - 1)
    return _plain(theta * growth ** (dim / (dim - 2)), dim)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths divided by the factor, short ones kept, a linear blend (in turns per context) between."""
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(theta: float, dim: int, scaling: RopeScaling) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): interpolate slow dimensions, keep fast ones, a ramp over dimensions between."""

    def dimension_turning(times: float) -> float:
        return dim * math.log(scaling.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_turning(scaling.beta_fast or 32)), 0)
    high = min(math.ceil(dimension_turning(scaling.beta_slow or 1)), dim - 1)
    if low == high:
        high += 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = _plain(theta, dim)
    return frequencies / scaling.factor * interpolated + frequencies * (1 - interpolated)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def _longrope(theta: float, dim: int, scaling: RopeScaling, max_seq_len: int) -> torch.Tensor:
    """LongRoPE (arXiv 2402.13753): the long factors where the engine outgrows the pretrained length."""
    is_long = max_seq_len > scaling.original_max_position_embeddings
    factors = torch.tensor(scaling.long_factor if is_long else scaling.short_factor, dtype=torch.float32)
    return 1.0 / (factors * _wavelengths_over_two_pi(theta, dim))


def _longrope_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))
