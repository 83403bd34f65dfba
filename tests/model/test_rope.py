"""Rotary frequencies of every scaling method, against transformers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.checkpoints.hf_config import read_architecture
from paceline.errors import CheckpointError
from paceline.model.architecture import RopeScaling
from paceline.model.rope import rope_cos_sin, rope_tables
from tiny_checkpoints import tiny_config

SHORT, LONG = [1.0 + i / 10 for i in range(8)], [2.0 + i / 10 for i in range(8)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 128, "factor": 2.0}
CASES = [
    ("linear", {"factor": 4.0}, 256),
    ("dynamic", {"factor": 2.0}, 100),
    ("dynamic", {"factor": 2.0}, 1000),
    ("llama3", LLAMA3, 256),
    ("llama3", {**LLAMA3, "low_freq_factor": 4.0}, 256),  # no blend: a step
    ("yarn", YARN, 256),
    ("yarn", {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.7}, 256),
    ("yarn", {**YARN, "mscale": 0.9, "mscale_all_dim": 0.4}, 256),
    ("longrope", LONGROPE, 128),
    ("longrope", LONGROPE, 129),
]


def architecture_with(kind: str, fields: dict):
    config = tiny_config("llama", rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **fields})
    return config, read_architecture(config.to_dict() | {"architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize(("kind", "fields", "max_seq_len"), CASES)
def test_frequencies_equal_transformers(kind, fields, max_seq_len):
    config, architecture = architecture_with(kind, fields)
    expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_seq_len)
    frequencies, factor = rope_tables(architecture, 0, max_seq_len)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-7)
    plain, _ = rope_tables(replace(architecture, rope_scalings=(None,) * architecture.num_layers), 0, max_seq_len)
    unscaled = kind == "dynamic" and max_seq_len <= architecture.max_position_embeddings
    assert torch.allclose(frequencies, plain) == unscaled  # the scaling of each case does something


def test_layers_differ_where_the_architecture_says_so():
    architecture = read_architecture(tiny_config("gemma3").to_dict() | {"architectures": ["Gemma3ForCausalLM"]})
    local, everywhere = (rope_tables(architecture, layer, 64)[0] for layer in (0, 1))
    assert local[-1] > everywhere[-1]


def test_tables_are_the_angles_of_each_position_times_the_attention_factor():
    _, architecture = architecture_with("yarn", YARN)
    frequencies, factor = rope_tables(architecture, 0, 40)
    cosine, sine = rope_cos_sin(architecture, 0, 40)
    assert cosine.shape == sine.shape == (40, architecture.head_dim // 2)
    assert cosine.is_contiguous() and sine.is_contiguous() and cosine.dtype == sine.dtype == torch.float32
    angles = 39 * frequencies.double()
    torch.testing.assert_close(cosine[39].double(), angles.cos() * factor, rtol=0, atol=1e-5)
    torch.testing.assert_close(sine[39].double(), angles.sin() * factor, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("theta", "scaling"),
    [
        (1.0, RopeScaling("yarn", factor=4.0, original_max_position_embeddings=64)),
        (10000.0, RopeScaling("linear", factor=0.0)),
        (10000.0, RopeScaling("longrope", 2.0, original_max_position_embeddings=1, short_factor=(1.0,) * 8,
                              long_factor=(1.0,) * 8)),
    ],
)  # fmt: skip
def test_settings_without_finite_frequencies_are_refused(theta, scaling):
    _, architecture = architecture_with("linear", {"factor": 1.0})
    layers = architecture.num_layers
    broken = replace(architecture, rope_thetas=(theta,) * layers, rope_scalings=(scaling,) * layers)
    with pytest.raises(CheckpointError, match="no finite frequencies"):
        rope_tables(broken, 0, 64)


def test_unknown_scaling_is_refused_by_name():
    _, architecture = architecture_with("linear", {"factor": 1.0})
    broken = replace(architecture, rope_scalings=(RopeScaling("spiral"),) * architecture.num_layers)
    with pytest.raises(CheckpointError, match="'spiral' is not supported"):
        rope_tables(broken, 0, 64)
