from __future__ import annotations

import dataclasses

import pytest
import torch

from paceline.checkpoints.checkpoint import Checkpoint, LazyTensors, TensorEntry, expected_tensors
from paceline.checkpoints.local import open_directory
from paceline.errors import CheckpointError
from tiny_checkpoints import FAMILIES, make_tiny


def _rebuilt(checkpoint: Checkpoint, entries: dict[str, TensorEntry]) -> Checkpoint:
    return dataclasses.replace(checkpoint, tensors=LazyTensors(entries))


@pytest.mark.parametrize("family", FAMILIES)
def test_expected_tensors_are_those_transformers_saves(tiny, family):
    directory, model = tiny(family)
    architecture = open_directory(directory).architecture
    saved = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if architecture.tie_word_embeddings:
        del saved["lm_head.weight"]
    assert expected_tensors(architecture) == saved


def test_num_parameters_counts_a_tied_head_once(tiny):
    directory, model = tiny("gemma2")
    assert open_directory(directory).num_parameters == model.num_parameters()


def test_names_and_shapes_cost_no_reading(tiny):
    checkpoint = open_directory(tiny("llama")[0])

    def fail():
        raise AssertionError("a tensor was read")

    tensors = LazyTensors({name: dataclasses.replace(e, read=fail) for name, e in checkpoint.tensors.entries.items()})
    assert len(tensors) == len(list(tensors)) == len(expected_tensors(checkpoint.architecture))
    assert "lm_head.weight" in tensors and "nothing" not in tensors
    assert tensors.shape("lm_head.weight") == (384, 64)
    assert tensors.largest_tensor_elements == 384 * 64


def test_a_missing_tensor_is_named(tiny):
    checkpoint = open_directory(tiny("llama")[0])
    entries = dict(checkpoint.tensors.entries)
    del entries["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor: `model\.layers\.1\.mlp\.up_proj\.weight`"):
        _rebuilt(checkpoint, entries)


def test_an_unexpected_tensor_is_named(tiny):
    checkpoint = open_directory(tiny("llama")[0])
    entries = dict(checkpoint.tensors.entries)
    entries["model.layers.0.self_attn.q_proj.bias"] = entries["model.norm.weight"]
    with pytest.raises(CheckpointError, match=r"holds 1 tensor: `model\.layers\.0\.self_attn\.q_proj\.bias`"):
        _rebuilt(checkpoint, entries)


def test_a_misshapen_tensor_is_named_with_both_shapes(tiny):
    checkpoint = open_directory(tiny("llama")[0])
    entries = dict(checkpoint.tensors.entries)
    entries["model.norm.weight"] = dataclasses.replace(entries["model.norm.weight"], shape=(63,))
    with pytest.raises(CheckpointError, match=r"`model\.norm\.weight` has shape \[63\], expected \[64\]"):
        _rebuilt(checkpoint, entries)


def test_digest_ignores_where_the_files_are_and_how_they_are_sharded(tiny, tmp_path):
    make_tiny("llama", tmp_path / "copy", max_shard_size="40KB")
    assert len(list((tmp_path / "copy").glob("*.safetensors"))) > 1
    assert open_directory(tmp_path / "copy").digest == open_directory(tiny("llama")[0]).digest


def test_digest_sees_other_weights_tokenizers_templates_and_settings(tiny, tmp_path):
    original = open_directory(tiny("llama")[0])
    make_tiny("llama", tmp_path / "seed", seed=1)
    changed = [
        open_directory(tmp_path / "seed"),
        dataclasses.replace(original, chat_template="{{ messages }}"),
        dataclasses.replace(original, eos_token_ids=frozenset({5})),
        dataclasses.replace(original, architecture=dataclasses.replace(original.architecture, rms_norm_eps=1e-5)),
    ]
    entry = original.tensors.entries["model.layers.2.mlp.down_proj.weight"]
    one_tensor = {
        **original.tensors.entries,
        "model.layers.2.mlp.down_proj.weight": dataclasses.replace(entry, sample=lambda: b"x"),
    }
    changed.append(_rebuilt(original, one_tensor))
    assert len({original.digest, *(checkpoint.digest for checkpoint in changed)}) == 6


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_read_as_transformers_has_them(tiny, family):
    directory, model = tiny(family)
    checkpoint = open_directory(directory)
    state = model.state_dict()
    assert all(torch.equal(checkpoint.tensors[name], state[name]) for name in checkpoint.tensors)
