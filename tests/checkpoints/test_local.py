from __future__ import annotations

import json
import shutil

import pytest
import safetensors.torch
import torch

from paceline.checkpoints.local import open_directory
from paceline.errors import CheckpointError
from tiny_checkpoints import BOS_TOKEN_ID, CHAT_TEMPLATE, EOS_TOKEN_ID, make_tiny


@pytest.fixture
def directory(tiny, tmp_path):
    return shutil.copytree(tiny("llama")[0], tmp_path / "model")


@pytest.fixture
def sharded(tmp_path):
    make_tiny("llama", tmp_path / "sharded", max_shard_size="40KB")
    return tmp_path / "sharded"


def _edit(path, **changes):
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def test_text_settings(directory):
    checkpoint = open_directory(directory)
    assert checkpoint.bos_token_id == BOS_TOKEN_ID
    assert checkpoint.eos_token_ids == {EOS_TOKEN_ID, 0}
    assert checkpoint.chat_template == CHAT_TEMPLATE
    assert checkpoint.special_tokens["eos_token"] == "<|im_end|>"
    assert checkpoint.default_sampling == {"temperature": 0.6, "top_p": 0.9}
    assert checkpoint.source == str(directory)
    text = "def add(a, b):  # ☃"
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode(text).ids) == text


def test_the_template_file_wins_then_the_processors_then_the_tokenizers(directory):
    _edit(directory / "chat_template.json", chat_template="processor")
    assert open_directory(directory).chat_template == "processor"
    (directory / "chat_template.jinja").write_text("file")
    assert open_directory(directory).chat_template == "file"


def test_of_named_templates_the_default_is_taken(directory):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    _edit(directory / "tokenizer_config.json", chat_template=named)
    assert open_directory(directory).chat_template == "plain"


def test_a_null_bos_token_means_there_is_none(directory):
    _edit(directory / "tokenizer_config.json", bos_token=None)
    assert open_directory(directory).bos_token_id is None


def test_stop_tokens_without_generation_config_come_from_config_and_tokenizer(directory):
    (directory / "generation_config.json").unlink()
    _edit(directory / "config.json", eos_token_id=7)
    checkpoint = open_directory(directory)
    assert checkpoint.eos_token_ids == {7, EOS_TOKEN_ID}
    assert checkpoint.default_sampling == {}


def test_truncation_left_in_the_tokenizer_is_switched_off(directory):
    _edit(
        directory / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    )
    assert len(open_directory(directory).tokenizer.encode("one two three four five").ids) > 2


def test_a_vision_model_is_read_for_its_text_part(tmp_path):
    model = make_tiny("gemma3", tmp_path / "text")
    for prefix, head in (("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")):
        directory = shutil.copytree(tmp_path / "text", tmp_path / prefix)
        stored = {prefix + name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()
                  if name != "lm_head.weight"}  # fmt: skip
        extra = {
            f"{head}weight": torch.zeros(1),
            "vision_tower.x": torch.zeros(1),
            "multi_modal_projector.y": torch.zeros(1),
        }
        safetensors.torch.save_file({**stored, **extra}, directory / "model.safetensors")
        text_config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(
            json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text_config})
        )
        checkpoint = open_directory(directory)
        assert checkpoint.architecture == open_directory(tmp_path / "text").architecture
        assert torch.equal(checkpoint.tensors["model.norm.weight"], model.state_dict()["model.norm.weight"])


def test_leftovers_of_old_files_are_left_out(directory):
    _edit(directory / "config.json", tie_word_embeddings=True)
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    checkpoint = open_directory(directory)
    assert "lm_head.weight" not in checkpoint.tensors
    assert len(checkpoint.tensors) == len(tensors) - 2


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(directory, name):
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")) as caught:
        open_directory(directory)
    assert caught.value.hint


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"architectures": 5, "model_type": []}'])
def test_a_damaged_config_is_an_error_not_a_crash(directory, content):
    (directory / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_directory(directory)


def test_a_damaged_tokenizer_is_an_error(directory):
    (directory / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json` cannot be read"):
        open_directory(directory)


def test_a_config_of_another_size_is_refused_before_anything_is_read(directory):
    _edit(directory / "config.json", intermediate_size=128)
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight` has shape \[96, 64\], expected \[128, 64\]"):
        open_directory(directory)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_truncated_weights_are_refused(directory, keep):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors` is truncated or corrupt"):
        open_directory(directory)


def test_a_hostile_header_length_is_refused(directory):
    path = directory / "model.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="truncated or corrupt"):
        open_directory(directory)


def test_a_git_lfs_pointer_is_recognised(directory):
    (directory / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer") as caught:
        open_directory(directory)
    assert "git lfs pull" in caught.value.hint


def test_weights_that_vanish_after_opening_are_an_error(directory):
    checkpoint = open_directory(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tensor `model\.norm\.weight` cannot be read"):
        checkpoint.tensors["model.norm.weight"]


def test_integer_weights_are_refused(directory):
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    safetensors.torch.save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"`model\.norm\.weight` is stored as I8"):
        open_directory(directory)


def test_pickles_are_refused_with_a_way_out(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"only pickled weights \(`pytorch_model\.bin`\)") as caught:
        open_directory(directory)
    assert "save_pretrained" in caught.value.hint


def test_a_missing_shard_is_named(sharded):
    shards = sorted(sharded.glob("*.safetensors"))
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 of {len(shards)} weight files, .*`{shards[1].name}`"):
        open_directory(sharded)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "weights.bin", 3])
def test_an_index_that_points_elsewhere_is_refused(sharded, shard):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = shard
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"`weight_map\.model\.norm\.weight` is"):
        open_directory(sharded)


def test_an_index_that_does_not_match_its_shards_is_refused(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra"] = index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"lacks tensor `model\.extra`"):
        open_directory(sharded)
