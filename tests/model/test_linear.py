"""Quantisation, packing and the int8 arithmetic, against plain integer loops and properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.errors import CompatibilityError
from paceline.model.linear import (
    DenseLinear,
    Int8Linear,
    Linear,
    pack_float,
    pack_int8,
    quantize_rows,
    quantize_weight,
    unpack_float,
    unpack_int8,
)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_weights_are_symmetric_per_output_and_round_half_to_even():
    weight = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0], [-254.0, 1.0, 3.0, 254.0]])
    quantised, scale = quantize_weight(weight)
    assert quantised.tolist() == [[127, 0, 2, -2], [0, 0, 0, 0], [-127, 0, 2, 127]]
    assert scale.tolist() == [1.0, 1.0, 2.0]
    assert (quantised.dtype, scale.dtype) == (torch.int8, torch.float32)


def test_weights_too_small_for_a_scale_become_zero():
    quantised, scale = quantize_weight(torch.full((1, 4), 1e-45))
    assert quantised.tolist() == [[0, 0, 0, 0]]
    assert scale.tolist() == [1.0]


def test_rows_have_one_scale_per_group():
    rows = torch.tensor([[127.0, 2.5, -3.5, 0.0, 12.7, 0.0, -1.27, 0.1], [0.0] * 4 + [1.0, -1.0, 0.5, 0.25]])
    quantised, scales = quantize_rows(rows, 4)
    assert quantised.tolist() == [[127, 2, -4, 0, 127, 0, -13, 1], [0, 0, 0, 0, 127, -127, 64, 32]]
    assert scales.tolist() == (torch.tensor([[127.0, 12.7], [0.0, 1.0]]) / 127).tolist()


def test_rows_whose_inverse_scale_overflows_become_zero():
    quantised, _ = quantize_rows(torch.full((1, 4), 1e-38), 4)
    assert quantised.tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("num_outputs", [1, 16, 37])
def test_packing_round_trips_and_pads_with_zero_weights(num_outputs):
    quantised = torch.randint(-127, 128, (num_outputs, 24), dtype=torch.int8)
    packed = pack_int8(quantised)
    assert (packed.dtype, packed.shape) == (torch.uint8, (-(-num_outputs // 16), 6, 16, 4))
    assert torch.equal(unpack_int8(packed, num_outputs), quantised)
    assert (unpack_int8(packed, 16 * len(packed))[num_outputs:] == 0).all()
    weight = random(num_outputs, 24).to(torch.bfloat16)
    assert torch.equal(unpack_float(pack_float(weight), num_outputs), weight)


def test_packed_layout_is_the_one_the_kernels_read():
    quantised = torch.arange(-100, 60, dtype=torch.int8).view(20, 8)
    packed, output, index = pack_int8(quantised), 18, 6
    assert packed[output // 16, index // 4, output % 16, index % 4] == int(quantised[output, index]) + 128
    assert pack_float(quantised.float())[output // 16, index, output % 16] == quantised[output, index]


def test_int8_needs_inputs_in_fours():
    with pytest.raises(CompatibilityError, match="multiple of 4 inputs, got 6"):
        pack_int8(torch.zeros((16, 6), dtype=torch.int8))
    with pytest.raises(CompatibilityError, match="`activation_group`: 12"):
        Int8Linear.from_float(random(16, 32), 12)


@pytest.mark.parametrize(("num_inputs", "group"), [(64, 16), (64, 64), (2400, 1200)])
def test_int8_is_the_documented_sum_in_exact_integers(num_inputs, group):
    weight, inputs, bias = random(21, num_inputs, seed=1), random(5, num_inputs, seed=2) * 3, random(21, seed=3)
    layer = Int8Linear.from_float(weight, group, bias)
    (qw, sw), (qx, sx) = quantize_weight(weight), quantize_rows(inputs, group)
    expected = np.zeros((5, 21), np.float32)
    for g in range(num_inputs // group):
        part = slice(g * group, (g + 1) * group)
        dots = (qx[:, part].numpy().astype(np.int64) @ qw[:, part].numpy().astype(np.int64).T).astype(np.float32)
        # float64 rounds the product to nothing: the sum alone is rounded to float32, as by a fused multiply-add
        expected = (dots.astype(np.float64) * sx[:, g, None].numpy() + expected).astype(np.float32)
    expected = expected * sw.numpy() + bias.numpy()
    assert np.array_equal(layer(inputs).numpy(), expected)
    exact = inputs @ weight.T + bias
    assert (layer(inputs) - exact).norm() < 0.02 * exact.norm()


def test_dot_products_at_the_limit_stay_exact():
    """All weights and inputs at 127, in the longest group that still uses float32 and the next."""
    for num_inputs in (1040, 1044):
        layer = Int8Linear(torch.full((3, num_inputs), 127, dtype=torch.int8), torch.ones(3), num_inputs)
        inputs = torch.full((2, num_inputs), 127.0)
        inputs[1, 0] = -126.0
        sums = [127 * 127 * num_inputs, 127 * 127 * num_inputs - 127 * 253]
        assert layer(inputs).tolist() == [[float(np.float32(total))] * 3 for total in sums]


def test_int8_rows_do_not_depend_on_their_neighbours():
    layer, inputs = Int8Linear.from_float(random(33, 64), 16), random(7, 64, seed=4)
    assert torch.equal(layer(inputs)[3], layer(inputs[3:4])[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_weights_multiply_float32_inputs(dtype):
    weight, inputs, bias = random(21, 40).to(dtype), random(5, 40, seed=1), random(21, seed=2)
    expected = inputs @ weight.float().T + bias
    assert torch.allclose(DenseLinear(weight, bias)(inputs), expected, atol=1e-5)
    assert torch.equal(DenseLinear(weight).rows(torch.tensor([4, 0])), weight[[4, 0]].float())


@pytest.mark.parametrize("group", [16, 12])  # 12 does not divide 64: one scale per row
def test_packed_int8_layer_equals_the_unpacked_one(group):
    weight, inputs = random(21, 64), random(5, 64, seed=1)
    quantised, scale = quantize_weight(weight)
    padded = torch.nn.functional.pad(scale, (0, 11)), torch.nn.functional.pad(random(21, seed=2), (0, 11))
    layer = Linear(pack_int8(quantised), 21, *padded, group)
    assert torch.equal(layer(inputs), Int8Linear(quantised, scale, 64 if group == 12 else 16, padded[1][:21])(inputs))
    assert torch.equal(layer.rows(torch.tensor([20, 3])), quantised[[20, 3]].float() * scale[[20, 3], None])


def test_packed_float_layer_equals_the_unpacked_one():
    weight, inputs = random(21, 40), random(5, 40, seed=1)
    assert torch.equal(Linear(pack_float(weight), 21)(inputs), DenseLinear(weight)(inputs))
