"""Linear layers in PyTorch: float weights, and the exact arithmetic of our int8 kernels.

The one home of how weights are quantised and packed, and the reference that kernels/linear.h is tested against. Knows
nothing of models or files.

int8: weights symmetric per output, activations symmetric per row and per group of neighbouring inputs, dot products in
exact integers. With s a scale and q an integer in [-127, 127]:

    y[row, n] = (sum over groups g of float32(dot(q_x[row, g], q_w[n, g])) * s_x[row, g]) * s_w[n] + bias[n]

in float32, groups in ascending order, each a fused multiply-add.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from paceline.errors import CompatibilityError

LANES = 16  # outputs per packed block
QUARTET = 4  # neighbouring inputs of one output that a kernel multiplies at once
LARGEST = 127  # of a quantised weight or input, either sign
# Integers below 2^24 are exact in float32 whatever the order of summation: the longest dot product that stays there.
LONGEST_FLOAT32_GROUP = 2**24 // LARGEST**2


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 per output: float [out, in] -> (int8 [out, in], float32 scales [out]).

    scale = max|w| / 127, or 1 where that is zero; q = w / scale rounded half to even.
    """
    weight = weight.float()
    scale = weight.abs().amax(dim=1) / LARGEST
    scale = torch.where(scale == 0, 1.0, scale)
    return (weight / scale[:, None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8), scale


def quantize_rows(inputs: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Symmetric int8 per row and group: float [rows, in] -> (int8 [rows, in], float32 scales [rows, in / group]).

    q = x * (127 / max|x|) rounded half to even. A group whose maximum is zero, or so small that 127 / max overflows,
    has q = 0.
    """
    grouped = inputs.float().unflatten(1, (-1, group))
    largest = grouped.abs().amax(dim=2)
    inverse = LARGEST / largest
    inverse = torch.where(inverse.isinf(), 0.0, inverse)
    quantised = (grouped * inverse[:, :, None]).round_().to(torch.int8)
    return quantised.flatten(1), largest / LARGEST


def pack_int8(quantised: torch.Tensor) -> torch.Tensor:
    """int8 [out, in] -> uint8 [ceil(out / 16), in / 4, 16, 4] holding q + 128; missing outputs hold 128 (zero).

    Raises CompatibilityError unless `in` is a multiple of 4.
    """
    num_outputs, num_inputs = quantised.shape
    if num_inputs % QUARTET:
        raise CompatibilityError(
            f"int8 layers need a multiple of {QUARTET} inputs, got {num_inputs}", hint="use `quantization: bf16`."
        )
    unsigned = (quantised.to(torch.int16) + 128).to(torch.uint8)
    unsigned = functional.pad(unsigned, (0, 0, 0, -num_outputs % LANES), value=128)
    return unsigned.view(-1, LANES, num_inputs // QUARTET, QUARTET).permute(0, 2, 1, 3).contiguous()


def unpack_int8(packed: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """The int8 [num_outputs, in] that `pack_int8` was given."""
    unsigned = packed.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:num_outputs]
    return (unsigned.to(torch.int16) - 128).to(torch.int8)


def pack_float(weight: torch.Tensor) -> torch.Tensor:
    """float [out, in] -> the same dtype, [ceil(out / 16), in, 16]; missing outputs are zero."""
    padded = functional.pad(weight, (0, 0, 0, -weight.shape[0] % LANES))
    return padded.view(-1, LANES, weight.shape[1]).transpose(1, 2).contiguous()


def unpack_float(packed: torch.Tensor, num_outputs: int) -> torch.Tensor:
    """The float [num_outputs, in] that `pack_float` was given."""
    return packed.transpose(1, 2).flatten(0, 1)[:num_outputs].contiguous()


class DenseLinear:
    """Float weights [out, in], bfloat16 or float32.

    On a GPU in the dtype of the weights; on a CPU in float32, as the kernels do.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.weight, self.bias = weight, bias

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """float32 [rows, in] -> float32 [rows, out]."""
        dtype = self.weight.dtype if inputs.is_cuda else torch.float32
        outputs = functional.linear(inputs.to(dtype), self.weight.to(dtype)).float()
        return outputs if self.bias is None else outputs + self.bias

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weights, float32 [len(indices), in]: an embedding that shares them."""
        return self.weight[indices].float()


class Int8Linear:
    """int8 weights [out, in] and float32 scales [out]; see the module's formula.

    `group` is how many inputs share one activation scale; it divides `in` and is a multiple of 4.
    """

    def __init__(self, quantised: torch.Tensor, scale: torch.Tensor, group: int, bias: torch.Tensor | None = None):
        num_inputs = quantised.shape[1]
        if group <= 0 or group % QUARTET or num_inputs % group:
            raise CompatibilityError(
                f"`activation_group`: {group} is no multiple of {QUARTET} dividing a layer's {num_inputs} inputs",
                hint="use `quantization: bf16`, or rebuild the engine.",
            )
        self.quantised, self.scale, self.group, self.bias = quantised, scale, group, bias

    @classmethod
    def from_float(cls, weight: torch.Tensor, group: int, bias: torch.Tensor | None = None) -> Int8Linear:
        """Quantise float weights [out, in]."""
        return cls(*quantize_weight(weight), group, bias)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """float32 [rows, in] -> float32 [rows, out]."""
        quantised, scales = quantize_rows(inputs, self.group)
        exact = torch.float32 if self.group <= LONGEST_FLOAT32_GROUP else torch.float64
        total = torch.zeros((inputs.shape[0], len(self.scale)), dtype=torch.float32, device=inputs.device)
        for index in range(scales.shape[1]):
            part = slice(index * self.group, (index + 1) * self.group)
            dot = (quantised[:, part].to(exact) @ self.quantised[:, part].to(exact).T).float()
            # float64 holds the product exactly, so that only the sum is rounded: what a fused multiply-add does.
            total = (dot.double() * scales[:, index, None].double() + total.double()).float()
        outputs = total * self.scale
        return outputs if self.bias is None else outputs + self.bias

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the dequantised weights, float32 [len(indices), in]: an embedding that shares them."""
        return self.quantised[indices].float() * self.scale[indices, None]


class Linear:
    """A layer of an engine, unpacked onto `device`: int8 where `packed` is uint8 (with `scale`), else float.

    `scale` and `bias` may be padded to whole blocks. Where `group` does not divide the inputs, a row has one scale.
    """

    def __init__(
        self,
        packed: torch.Tensor,
        num_outputs: int,
        scale: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        group: int = QUARTET,
        device: str = "cpu",
    ):
        bias = None if bias is None else bias[:num_outputs].to(device)
        if packed.dtype == torch.uint8:
            weight = unpack_int8(packed, num_outputs).to(device)
            group = group if weight.shape[1] % group == 0 else weight.shape[1]
            self._layer = Int8Linear(weight, scale[:num_outputs].to(device), group, bias)
        else:
            self._layer = DenseLinear(unpack_float(packed, num_outputs).to(device), bias)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """float32 [rows, in] -> float32 [rows, out]."""
        return self._layer(inputs)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of the weights, float32 [len(indices), in]."""
        return self._layer.rows(indices)
