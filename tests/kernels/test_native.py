"""The C++ kernels: against their reference, and row by row across batch shapes, threads and compilers, bit for bit."""

from __future__ import annotations

import ctypes
import shutil

import numpy as np
import pytest
import torch

from backends import backend_of, batch_of, pool, weights_of
from paceline.model.linear import Int8Linear, pack_float, pack_int8, quantize_weight
from paceline.runtime.backend_native import _Linear
from paceline.runtime.sampling import TorchSamplingKernels
from paceline.runtime.sampling_native import NativeSamplingKernels

COMPILERS = [name for name in ("g++", "clang++", "clang++-16", "clang++-19") if shutil.which(name)]


def run_linear(packed, scale, bias, x, num_out, group, threads) -> torch.Tensor:
    kind = {torch.uint8: 0, torch.bfloat16: 1, torch.float32: 2}[packed.dtype]
    pointer = lambda t: None if t is None else t.data_ptr()  # noqa: E731
    layer = _Linear(packed.data_ptr(), pointer(scale), pointer(bias), kind, x.shape[1], num_out, group)
    out = torch.empty((x.shape[0], -(-num_out // 16) * 16))
    threads.kernels.paceline_linear(ctypes.byref(layer), x.data_ptr(), x.shape[0], out.data_ptr(), threads.handle)
    return out[:, :num_out]


def make_int8(num_in: int, num_out: int, seed: int):
    torch.manual_seed(seed)
    quantised, scale = quantize_weight(torch.randn(num_out, num_in))
    padding = (0, -num_out % 16)
    bias = torch.randn(num_out)
    pad = torch.nn.functional.pad
    return quantised, scale, bias, (pack_int8(quantised), pad(scale, padding), pad(bias, padding))


@pytest.mark.parametrize("defines", [(), ("PACELINE_PORTABLE",)], ids=["native", "portable"])
@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 16, 17, 33])
def test_int8_linear_is_the_reference(compiler, defines, rows):
    num_in, num_out, group = 192, 100, 64
    quantised, scale, bias, packed = make_int8(num_in, num_out, rows)
    x = torch.randn(rows, num_in) * torch.logspace(-3, 3, num_in)
    got = run_linear(packed[0], packed[1], packed[2], x, num_out, group, pool(2, compiler, defines))
    expected = Int8Linear(quantised, scale, group, bias)(x)
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_linear_is_the_reference(dtype):
    torch.manual_seed(0)
    weight, x = torch.randn(70, 130).to(dtype), torch.randn(13, 130)
    got = run_linear(pack_float(weight), None, None, x, 70, 130, pool())
    assert torch.allclose(got, x @ weight.float().T, atol=1e-3)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("kind", ["int8", "bf16", "float32"])
def test_a_linear_rows_bits_do_not_depend_on_the_batch_or_the_threads(compiler, kind):
    num_in, num_out, rows = 256, 144, 40
    x = torch.randn(rows, num_in, generator=torch.Generator().manual_seed(3))
    if kind == "int8":
        packed, scale, bias = make_int8(num_in, num_out, 1)[3]
    else:
        weight = torch.randn(num_out, num_in).to(torch.bfloat16 if kind == "bf16" else torch.float32)
        packed, scale, bias = pack_float(weight), None, None
    alone = torch.cat(
        [run_linear(packed, scale, bias, x[i : i + 1], num_out, 64, pool(1, compiler)) for i in range(rows)]
    )
    for size in (2, 3, 4, 7, 8, 13, 16, 24, 40):
        for threads in (1, 2, 3):
            batched = torch.cat([
                run_linear(packed, scale, bias, x[i : i + size].contiguous(), num_out, 64, pool(threads, compiler))
                for i in range(0, rows, size)
            ])  # fmt: skip
            assert torch.equal(alone, batched), (size, threads)


def test_zero_and_extreme_inputs_stay_finite():
    packed, scale, bias = make_int8(64, 32, 0)[3]
    x = torch.zeros(3, 64)
    x[1, 5], x[2, 7] = 1e30, 1e-42
    got = run_linear(packed, scale, bias, x, 32, 64, pool())
    assert torch.isfinite(got).all()
    assert torch.equal(got[0], bias[:32])


FAMILIES = [("llama", {}), ("qwen2", {"head_dim": 32}), ("qwen3", {"head_dim": 32}), ("gemma2", {"head_dim": 32}),
            ("gemma3", {"head_dim": 32}), ("mistral", {})]  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f[0])
@pytest.mark.parametrize("quantization", ["int8", "bf16"])
def test_decoder_rows_are_bit_identical_in_every_batch_shape(tiny, family, quantization):
    """One by one, chunked at every size, beside strangers, on 1 to 3 threads: the same bits."""
    directory, _ = tiny(family[0], **family[1])
    weights = weights_of(directory, quantization)
    tokens = torch.randint(3, 300, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    stranger = torch.randint(3, 300, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    table = [40 - i for i in range(10)]

    def run(chunk: int, with_stranger: bool, threads: int) -> torch.Tensor:
        backend = backend_of(weights, "native", kv_dtype=torch.bfloat16, threads=pool(threads), max_rows=256)
        rows = []
        for first in range(0, len(tokens), chunk):
            spans = [(tokens[first : first + chunk], first, table)]
            if with_stranger:
                spans.insert(0, (stranger[:9], 0, [50]))
            got = backend.forward(batch_of(spans)).clone()
            rows.append(got[9:] if with_stranger else got)
        return torch.cat(rows)

    alone = run(1, False, 1)
    for chunk, with_stranger, threads in [(2, False, 2), (7, True, 2), (16, False, 3), (33, True, 1), (150, False, 2)]:
        assert torch.equal(alone, run(chunk, with_stranger, threads)), (chunk, with_stranger, threads)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f[0])
def test_int8_decoder_is_close_to_its_reference(tiny, family):
    directory, _ = tiny(family[0], **family[1])
    weights = weights_of(directory, "int8")
    tokens = torch.randint(3, 300, (60,), generator=torch.Generator().manual_seed(5)).tolist()
    native, reference = (
        backend_of(weights, name, kv_dtype=torch.float32).forward(batch_of([(tokens, 0, [3, 1, 2, 9])])).clone()
        for name in ("native", "torch")
    )
    # Roundings to int8 fall differently where float sums differ in the last bit: close on average, not everywhere.
    assert (native - reference).abs().mean() < 0.02 * reference.std()


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("vocab", [17, 1003, 32000])
def test_sampling_kernels_are_the_reference(compiler, vocab):
    native, reference = NativeSamplingKernels(pool(2, compiler)), TorchSamplingKernels()
    logits = torch.randn(9, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    logits[3, ::2] = -float("inf")
    logits[4] = 0.0  # every token equal: the lowest id must win
    assert native.argmax(logits) == reference.argmax(logits)
    for seed in (0, 7, -1, 2**63 - 1):
        positions = list(range(seed % 5, seed % 5 + 9))
        assert native.gumbel_argmax(logits, seed, positions) == reference.gumbel_argmax(logits, seed, positions)
    ids = [int(i) for i in np.random.default_rng(0).integers(0, vocab, 9)]
    ids[3] = 1
    assert native.logprobs(logits, ids) == pytest.approx(reference.logprobs(logits, ids), abs=1e-5)


@pytest.mark.parametrize("size", [64, 4096, (1 << 18) + 192, 3 << 18])
def test_read_touches_every_byte_once(size):
    memory = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    threads = pool(2)
    got = threads.kernels.paceline_read(memory.ctypes.data, size, threads.handle)
    assert got == int(np.bitwise_xor.reduce(memory.view(np.uint64)))
