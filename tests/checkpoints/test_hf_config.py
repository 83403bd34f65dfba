from __future__ import annotations

import json

import pytest
import transformers

from paceline.checkpoints.hf_config import read_architecture
from paceline.errors import CheckpointError
from paceline.model.architecture import RopeScaling
from tiny_checkpoints import FAMILIES, tiny_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 4}


def _saved(config: transformers.PreTrainedConfig, architecture: str) -> dict:
    return {**json.loads(config.to_json_string()), "architectures": [architecture]}


ARCHITECTURE_NAMES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family):
    """A config.json with sizes only means what transformers takes it to mean."""
    sizes = {key: LLAMA[key] for key in LLAMA if key not in ("architectures", "num_key_value_heads")}
    config_class = type(tiny_config(family))
    ours = read_architecture({**sizes, "architectures": [ARCHITECTURE_NAMES[family]], "num_key_value_heads": 2})
    full = json.loads(config_class(**sizes, num_key_value_heads=2).to_json_string(use_diff=False))
    theirs = read_architecture({**full, "architectures": [ARCHITECTURE_NAMES[family]]})
    assert ours == theirs


def test_every_default_is_stated_by_gemma3_of_transformers():
    """Published Gemma 3 files state six fields and leave the rest, heads and vocabulary included, to the class."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "model_type": "gemma3_text"}  # fmt: skip
    published = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    theirs = transformers.Gemma3TextConfig(**text)
    architecture = read_architecture(published)
    assert (architecture.num_heads, architecture.num_kv_heads, architecture.head_dim) == (8, 4, 256)
    assert (architecture.vocab_size, architecture.tie_word_embeddings) == (262208, True)
    assert architecture.attention_scale == 256**-0.5
    is_local = [kind == "sliding_attention" for kind in theirs.layer_types]
    assert [window == 1024 for window in architecture.sliding_windows] == is_local
    assert [theta == 10_000.0 for theta in architecture.rope_thetas] == is_local
    assert [scaling is None for scaling in architecture.rope_scalings] == is_local
    assert architecture.rope_scalings[5] == RopeScaling("linear", 8.0)
    assert architecture.rope_thetas[5] == 1_000_000.0


@pytest.mark.parametrize("layers", [None, ["full_attention", "sliding_attention", "full_attention", "full_attention"]])
def test_qwen_slides_only_where_it_says(layers):
    sliding = {**QWEN2, "sliding_window": 64, "max_window_layers": 3, "layer_types": layers}
    assert read_architecture(sliding).sliding_windows == (None,) * 4
    expected = (None, None, None, 64) if layers is None else (None, 64, None, None)
    assert read_architecture({**sliding, "use_sliding_window": True}).sliding_windows == expected


def test_mistral_slides_everywhere_unless_null():
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert read_architecture(mistral).sliding_windows == (4096, 4096)
    assert read_architecture({**mistral, "sliding_window": None}).sliding_windows == (None, None)


ROPE_KINDS = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
     "original_max_position_embeddings": 1024},
]  # fmt: skip


@pytest.mark.parametrize("given", ROPE_KINDS, ids=lambda given: given["rope_type"])
def test_both_spellings_of_rope_scaling_mean_the_same(given):
    old = read_architecture({**LLAMA, "rope_theta": 5e5, "rope_scaling": given})
    older = read_architecture(
        {**LLAMA, "rope_theta": 5e5, "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in given.items()}}
    )
    new = read_architecture({**LLAMA, "rope_parameters": {**given, "rope_theta": 5e5}})
    assert old == new == older
    assert old.rope_thetas == (5e5, 5e5)
    scaling = old.rope_scalings[0]
    assert scaling.kind == given["rope_type"]
    for key in given.keys() - {"rope_type", "short_factor", "long_factor"}:
        assert getattr(scaling, key) == given[key]


def test_a_length_given_twice_is_the_one_outside_and_sets_the_factor():
    longrope = {**ROPE_KINDS[4], "original_max_position_embeddings": 64}
    scaling = read_architecture({**LLAMA, "original_max_position_embeddings": 512, "rope_scaling": longrope})
    assert scaling.rope_scalings[0].original_max_position_embeddings == 512
    assert scaling.rope_scalings[0].factor == 4096 / 512


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "`architectures`: 'GPT2LMHeadModel' is not supported"),
        ({"architectures": ["MyModel"], "auto_map": {"AutoModel": "evil.Model"}}, "code from its repository"),
        ({"architectures": None, "model_type": "mamba"}, "'mamba' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        ({"hidden_act": "relu"}, "`hidden_act`: 'relu'"),
        ({"vocab_size": "many"}, "`vocab_size`: .*'many'"),
        ({"vocab_size": -1}, "`vocab_size`: .*-1"),
        ({"num_hidden_layers": 10**12}, "`num_hidden_layers`: .*1000000000000"),
        ({"hidden_size": None}, "`hidden_size`: "),
        ({"num_key_value_heads": 3}, "`num_key_value_heads`: 3 does not divide"),
        ({"head_dim": 15}, "`head_dim`: 15"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "`rope_type`: 'mrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "`rope_scaling.low_freq_factor`: missing"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1], "long_factor": [1]}}, "1 values, expected 8"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "truncate": False}}, "truncate"),
        ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor`: 0.5"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["full_attention"]},
         "1 entries for 2 layers"),
        ({"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "layer_types": ["linear_attention"] * 2},
         "'linear_attention' is not supported"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_faithfully_is_refused_by_field(change, message):
    with pytest.raises(CheckpointError, match=message):
        read_architecture({**LLAMA, **change})


def test_a_missing_size_is_named():
    with pytest.raises(CheckpointError, match="`hidden_size`: field required"):
        read_architecture({key: value for key, value in LLAMA.items() if key != "hidden_size"})
