"""From checkpoint tensors to an engine's: names, padding, error bounds, and layers that keep bf16."""

from __future__ import annotations

import pytest
import torch

from paceline.build.quantize import MAX_WEIGHT_ERROR, activation_group, quantize_model
from paceline.checkpoints.resolve import open_checkpoint
from paceline.errors import CheckpointError
from paceline.model.linear import unpack_float, unpack_int8
from tiny_checkpoints import FAMILIES


def quantised(directory, quantization, vocab_size=384, edit=None):
    checkpoint = open_checkpoint(str(directory))
    tensors = {name: checkpoint.tensors[name].clone() for name in checkpoint.tensors}
    if edit:
        edit(tensors)
    errors: dict[str, float] = {}
    engine = dict(quantize_model(checkpoint.architecture, tensors, quantization, vocab_size, errors.__setitem__))
    return tensors, engine, errors


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_within_the_bound(tiny, family):
    tensors, engine, errors = quantised(tiny(family)[0], "int8")
    layers = {name.removesuffix(".weight") for name in engine if name.endswith(".weight")}
    assert errors.keys() == layers, "every layer's error is heard of"
    assert max(errors.values()) < MAX_WEIGHT_ERROR
    assert all(tensor.dtype == torch.uint8 for name, tensor in engine.items() if name.endswith(".weight"))
    down = tensors["model.layers.1.mlp.down_proj.weight"].float()
    scale = engine["layers.1.down.scale"][: len(down), None]
    restored = unpack_int8(engine["layers.1.down.weight"], len(down)).float() * scale
    assert ((restored - down).norm() / down.norm()).item() == pytest.approx(errors["layers.1.down"], rel=1e-3)


@pytest.mark.parametrize(("quantization", "dtype"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_float_weights_are_kept_exactly(tiny, quantization, dtype):
    tensors, engine, errors = quantised(tiny("qwen2")[0], quantization)
    assert errors == {}
    down = tensors["model.layers.0.mlp.down_proj.weight"].to(dtype)
    assert torch.equal(unpack_float(engine["layers.0.down.weight"], len(down)), down)
    qkv = torch.cat([tensors[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkv"]).to(dtype)
    assert torch.equal(unpack_float(engine["layers.0.qkv.weight"], len(qkv)), qkv)
    biases = torch.cat([tensors[f"model.layers.0.self_attn.{part}_proj.bias"] for part in "qkv"])
    assert torch.equal(engine["layers.0.qkv.bias"][: len(biases)], biases)


def test_gate_and_up_alternate_in_blocks_of_16(tiny):
    tensors, engine, _ = quantised(tiny("llama")[0], "float32")
    gate, up = (tensors[f"model.layers.0.mlp.{part}_proj.weight"] for part in ("gate", "up"))
    fused = unpack_float(engine["layers.0.gate_up.weight"], 2 * len(gate))
    assert torch.equal(fused[:16], gate[:16]) and torch.equal(fused[16:32], up[:16])
    assert torch.equal(fused[-32:-16], gate[-16:]) and torch.equal(fused[-16:], up[-16:])


def test_layer_with_outliers_keeps_bf16(tiny):
    """In steps of 1/127 of each row's one huge weight, the other 511 are too coarse."""

    def spread(tensors):
        weight = tensors["model.layers.2.mlp.down_proj.weight"]
        weight.copy_(torch.linspace(0.5, 1.5, weight.numel()).view(weight.shape))
        weight[:, 5] = 60.0

    tensors, engine, errors = quantised(tiny("llama", intermediate_size=512)[0], "int8", edit=spread)
    assert [name for name, error in errors.items() if error > MAX_WEIGHT_ERROR] == ["layers.2.down"]
    down = tensors["model.layers.2.mlp.down_proj.weight"]
    assert torch.equal(unpack_float(engine["layers.2.down.weight"], len(down)), down.to(torch.bfloat16))
    assert "layers.2.down.scale" not in engine and "layers.1.down.scale" in engine


def test_vocabulary_padding_is_cut(tiny):
    tensors, engine, _ = quantised(tiny("qwen2", vocab_size=448)[0], "float32", vocab_size=384)
    assert tensors["model.embed_tokens.weight"].shape[0] == 448
    assert engine["head.weight"].shape[0] * 16 == 384
    assert torch.equal(unpack_float(engine["head.weight"], 384), tensors["lm_head.weight"][:384])
    assert torch.equal(unpack_float(engine["embedding.weight"], 384), tensors["model.embed_tokens.weight"][:384])


def test_vocabulary_that_fills_no_whole_block(tiny):
    _, engine, _ = quantised(tiny("llama")[0], "int8", vocab_size=371)
    assert engine["head.weight"].shape[0] == 24 and len(engine["head.scale"]) == 384


def test_tied_embeddings_are_stored_once(tiny):
    _, engine, _ = quantised(tiny("gemma2")[0], "int8")
    assert "head.weight" in engine and "embedding.weight" not in engine


def test_gemma_norms_have_one_added(tiny):
    tensors, engine, _ = quantised(tiny("gemma3")[0], "int8")
    assert torch.allclose(engine["final_norm"], tensors["model.norm.weight"].float() + 1)


def test_zero_weights_have_no_error(tiny):
    _, engine, errors = quantised(
        tiny("llama")[0], "int8", edit=lambda tensors: tensors["model.layers.0.mlp.down_proj.weight"].zero_()
    )
    assert errors["layers.0.down"] == 0
    assert (unpack_int8(engine["layers.0.down.weight"], 64) == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(tiny, value):
    def damage(tensors):
        tensors["model.layers.0.self_attn.k_proj.weight"][0, 0] = value

    with pytest.raises(CheckpointError, match=r"`layers\.0\.qkv` are not finite"):
        quantised(tiny("llama")[0], "int8", edit=damage)


def test_activation_group_divides_every_layers_inputs(tiny):
    for family in FAMILIES:
        a = open_checkpoint(str(tiny(family)[0])).architecture
        group = activation_group(a)
        assert group % 4 == 0 and group <= 128
        assert not any(size % group for size in (a.hidden_size, a.intermediate_size, a.num_heads * a.head_dim))
