from __future__ import annotations

import dataclasses

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Quantization
from transformers import LlamaConfig
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.checkpoints.gguf import open_gguf
from paceline.checkpoints.local import open_directory
from paceline.errors import CheckpointError
from tiny_checkpoints import CHAT_TEMPLATE, FAMILIES, tiny_config, tiny_tokenizer
from tiny_gguf import dequantized, write_gguf

# What a GGUF file cannot say is left at what llama.cpp assumes: Gemma's query scale and layer pattern.
OVERRIDES = {
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {"query_pre_attn_scalar": 24, "num_hidden_layers": 7, "layer_types": None},
    "mistral": {"sliding_window": None},
}


@pytest.fixture
def tiny_gguf(tiny, tmp_path):
    def make(family, quantization=Quantization.F32, edit=None, **overrides):
        directory, model = tiny(family, **{**OVERRIDES.get(family, {}), **overrides})
        path = write_gguf(model, tmp_path / f"{family}.gguf", quantization, edit=edit)
        return path, directory, model

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_is_the_original(tiny_gguf, family):
    path, directory, _ = tiny_gguf(family)
    ours, original = open_gguf(path), open_directory(directory)
    is_called = {"mistral": "llama"}.get(family, family)  # llama.cpp knows no Mistral
    assert ours.architecture == dataclasses.replace(original.architecture, family=is_called)
    for name in original.tensors:
        torch.testing.assert_close(ours.tensors[name], original.tensors[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_tensors_are_what_transformers_reads_from_the_same_file(tiny_gguf, family):
    path, _, model = tiny_gguf(family, Quantization.Q8_0)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    ours = open_gguf(path).tensors
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_encodings(tiny_gguf, name):
    quantization = Quantization[name]
    path, directory, _ = tiny_gguf("llama", quantization)
    ours, original = open_gguf(path), open_directory(directory)
    for tensor_name in ours.tensors:
        expected = dequantized(original.tensors[tensor_name], quantization).float()
        assert torch.equal(ours.tensors[tensor_name].float(), expected), tensor_name
    assert ours.tensors["model.norm.weight"].dtype == torch.float32


def test_text_settings(tiny_gguf):
    checkpoint = open_gguf(tiny_gguf("llama")[0])
    assert checkpoint.chat_template == CHAT_TEMPLATE
    assert checkpoint.bos_token_id == 1
    assert checkpoint.eos_token_ids == {0, 2}  # both end a turn, whichever the metadata names
    assert checkpoint.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    text = "<|im_start|>def add(first): 12 ☃\n\n"
    assert checkpoint.tokenizer.encode(text).ids == tiny_tokenizer().encode(text).ids


def test_the_digest_changes_with_the_encoding_and_not_with_the_place(tiny_gguf, tmp_path):
    path, _, model = tiny_gguf("llama", Quantization.Q8_0)
    again = write_gguf(model, tmp_path / "again.gguf", Quantization.Q8_0)
    other = write_gguf(model, tmp_path / "other.gguf", Quantization.Q4_0)
    assert open_gguf(path).digest == open_gguf(again).digest != open_gguf(other).digest


def test_llama3_factors_give_the_frequencies_of_the_scaling_they_stand_for(tiny, tmp_path):
    scaling = {"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    config = tiny_config("llama", rope_parameters=scaling)
    plain = 1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = (plain / scaled).numpy()
    edit = lambda writer: writer.add_tensor("rope_freqs.weight", factors)  # noqa: E731
    path = write_gguf(tiny("llama")[1], tmp_path / "llama3.gguf", edit=edit)
    architecture = open_gguf(path).architecture
    assert architecture.rope_scalings[0].kind == "longrope"
    as_longrope = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters={
        "rope_type": "longrope", "rope_theta": 10_000.0, "factor": architecture.rope_scalings[0].factor,
        "attention_factor": architecture.rope_scalings[0].attention_factor,
        "original_max_position_embeddings": architecture.rope_scalings[0].original_max_position_embeddings,
        "short_factor": list(architecture.rope_scalings[0].short_factor),
        "long_factor": list(architecture.rope_scalings[0].long_factor)})  # fmt: skip
    for length in (10, 100_000):
        frequencies, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](as_longrope, torch.device("cpu"), length)
        torch.testing.assert_close(frequencies, scaled)
        assert attention_factor == 1.0


def test_scaling_in_the_metadata(tiny_gguf):
    def yarn(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    def linear(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)

    scaling = open_gguf(tiny_gguf("qwen2", edit=yarn)[0]).architecture.rope_scalings[0]
    assert (scaling.kind, scaling.factor, scaling.original_max_position_embeddings) == ("yarn", 4.0, 64)
    scalings = open_gguf(tiny_gguf("gemma3", edit=linear)[0]).architecture.rope_scalings
    assert [scaling and scaling.factor for scaling in scalings] == [None] * 5 + [8.0, None]


def _number(key, value):
    return lambda writer: writer.add_uint32(key, value)


def _longrope(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_scaling_factor(2.0)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_number("split.count", 3), "split over several files"),
        (_number("llama.expert_count", 8), "mixtures of experts"),
        (_longrope, r"`llama\.rope\.scaling\.type`: 'longrope' is not supported"),
        (_number("llama.rope.dimension_count", 8), r"`llama\.rope\.dimension_count`: 8 is not supported"),
        (_number("llama.rope.scaling.factor", 0), r"`llama\.rope\.scaling\.factor`: 0 is not positive"),
    ],
)
def test_what_cannot_be_run_faithfully_is_refused(tiny_gguf, edit, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        open_gguf(tiny_gguf("llama", edit=edit)[0])
    assert "llama.gguf`: " in caught.value.message


def test_an_unknown_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"`general\.architecture`: 'mamba' is not supported"):
        open_gguf(tmp_path / "x.gguf")


def test_an_unknown_tensor_is_refused_by_its_stored_name(tiny_gguf):
    def edit(writer):
        writer.add_tensor("blk.0.attn_sinks.weight", torch.zeros(4).numpy())

    with pytest.raises(CheckpointError, match=r"`blk\.0\.attn_sinks\.weight` that a llama model does not have"):
        open_gguf(tiny_gguf("llama", edit=edit)[0])


def test_a_model_without_an_output_tensor_is_tied(tiny_gguf):
    path, directory, _ = tiny_gguf("llama", tie_word_embeddings=True)
    architecture = open_gguf(path).architecture
    assert architecture.tie_word_embeddings
    assert architecture == open_directory(directory).architecture
