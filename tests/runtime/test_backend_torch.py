"""The PyTorch backend: the protocol, cache dtypes, int8 weights, and devices that are not here."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends import backend_of, batch_of, weights_of
from paceline.errors import DeviceError
from paceline.runtime.backend import StepBatch
from paceline.runtime.backends import open_backend

TOKENS = [5, 80, 12, 200, 33, 7, 91, 140, 3, 66, 25, 18, 250, 44, 9, 101, 77, 58, 31, 160]


def test_attributes_of_the_protocol(tiny):
    weights = weights_of(tiny("llama")[0])
    backend = backend_of(weights, "torch", num_blocks=5, max_rows=32)
    assert (backend.num_blocks, backend.block_size, backend.max_rows) == (5, 16, 32)
    assert backend.vocab_size == weights.vocab_size


def test_only_the_wanted_rows_have_logits_and_none_is_fine(tiny):
    backend = backend_of(weights_of(tiny("llama")[0]), "torch")
    every = backend.forward(batch_of([(TOKENS, 0, [3, 1])]))
    batch = batch_of([(TOKENS, 0, [3, 1])])
    for wanted in ([4, 19], []):
        rows = np.array(wanted, np.int32)
        got = backend.forward(
            StepBatch(batch.token_ids, batch.positions, batch.sequence_of_row, batch.block_tables, rows)
        )
        assert got.dtype == torch.float32
        assert got.shape == (len(wanted), backend.vocab_size)
        torch.testing.assert_close(got, every[wanted], rtol=0, atol=1e-5)


def test_a_bfloat16_cache_changes_logits_a_little(tiny):
    weights = weights_of(tiny("llama")[0])
    full, half = (
        backend_of(weights, "torch", kv_dtype=dtype).forward(batch_of([(TOKENS, 0, [3, 1])]))
        for dtype in (torch.float32, torch.bfloat16)
    )
    difference = (full - half).abs().max()
    assert 0 < difference < 0.1 * full.std()


@pytest.mark.parametrize("tied", [True, False])
def test_int8_weights_stay_close_to_float32(tiny, tied):
    directory, model = tiny("llama", tie_word_embeddings=tied)
    weights = weights_of(directory, "int8")
    assert weights.tensors["head.weight"].dtype == torch.uint8
    assert ("embedding.weight" in weights.tensors) != tied
    got = backend_of(weights, "torch").forward(batch_of([(TOKENS, 0, [3, 1])]))
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0, :, : weights.vocab_size]
    assert (got - expected).norm() < 0.05 * expected.norm()


def test_results_do_not_track_gradients(tiny):
    backend = backend_of(weights_of(tiny("llama")[0]), "torch")
    assert backend.forward(batch_of([(TOKENS, 0, [3, 1])])).is_inference()


@pytest.mark.skipif(torch.cuda.is_available(), reason="an NVIDIA GPU is here")
def test_cuda_without_a_gpu_is_refused_with_a_hint(tiny):
    with pytest.raises(DeviceError, match="no NVIDIA GPU") as refused:
        open_backend(
            weights_of(tiny("llama")[0]), pool=None, device="cuda", num_blocks=4, max_rows=8, max_seq_len=64
        )
    assert "device: cpu" in refused.value.hint


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("quantization", ["bf16", "int8"])
def test_cuda_stays_close_to_the_cpu(tiny, quantization):
    weights = weights_of(tiny("gemma2")[0], quantization)
    on_gpu = open_backend(weights, pool=None, device="cuda", num_blocks=8, max_rows=32, max_seq_len=64)
    got = on_gpu.forward(batch_of([(TOKENS, 0, [3, 1])])).cpu()
    expected = backend_of(weights, "torch").forward(batch_of([(TOKENS, 0, [3, 1])]))
    assert (got - expected).norm() < 0.05 * expected.norm()
