"""The decoder against transformers, on tiny random checkpoints of every family, in PyTorch and in C++."""

from __future__ import annotations

import pytest
import torch

from backends import backend_of, batch_of, weights_of

PROMPT_LENGTH = 45  # three blocks of 16, and well past the tiny sliding windows of 12
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + i / 10 for i in range(16)],
            "long_factor": [2.0 + i / 10 for i in range(16)], "original_max_position_embeddings": 256}  # fmt: skip
CASES = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 32}),  # heads wider together than the hidden size
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": YARN}),
    ("llama", {"rope_parameters": LINEAR}),
    ("llama", {"rope_parameters": DYNAMIC}),
    ("llama", {"head_dim": 32, "rope_parameters": LONGROPE}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32}),
    ("mistral", {}),
    ("mistral", {"head_dim": 64, "num_key_value_heads": 1}),
    ("gemma2", {"head_dim": 32}),
    ("gemma3", {"head_dim": 32}),
]
TORCH_ONLY = [("qwen3", {}), ("gemma2", {}), ("gemma3", {})]  # head_dim 24: not a multiple of 16


def prompt(seed: int, length: int = PROMPT_LENGTH) -> list[int]:
    return torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def name_of(case) -> str:
    return f"{case[0]}-{'-'.join(map(str, case[1])) or 'plain'}"


@torch.no_grad()
def reference(model, tokens: list[int], vocab_size: int) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0, :, :vocab_size].float()


@pytest.mark.parametrize("case", CASES + TORCH_ONLY, ids=name_of)
@pytest.mark.parametrize("name", ["torch", "native"])
def test_logits_match_transformers_in_float32(tiny, case, name):
    if name == "native" and case in TORCH_ONLY:
        pytest.skip("the kernels refuse head_dim 24")
    directory, model = tiny(case[0], **case[1])
    weights = weights_of(directory)
    backend = backend_of(weights, name)
    tokens = prompt(1)
    table = [7, 3, 50, 11]
    got = backend.forward(batch_of([(tokens, 0, table)]))
    expected = reference(model, tokens, weights.vocab_size)
    assert (got - expected).abs().max() < 1e-4
    assert expected.std() > 0.1  # not all alike: the comparison means something


@pytest.mark.parametrize("name", ["torch", "native"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_chunks_batches_and_rollback_equal_whole_runs(tiny, family, name):
    directory, model = tiny(family, **({"head_dim": 32} if family == "gemma3" else {}))
    weights = weights_of(directory)
    backend = backend_of(weights, name)
    first, second = prompt(2), prompt(3, 30)
    tables = [9, 1, 40], [5, 60, 2]
    # Chunks of two sequences share steps, at different positions.
    backend.forward(batch_of([(first[:20], 0, tables[0])]))
    backend.forward(batch_of([(first[20:33], 20, tables[0]), (second[:17], 0, tables[1])]))
    # Rejected guesses are written, then overwritten.
    backend.forward(batch_of([([*second[17:20], 9, 9, 9, 9], 17, tables[1])]))
    got = backend.forward(batch_of([(first[33:], 33, tables[0]), (second[20:], 20, tables[1])]))
    expected = torch.cat([
        reference(model, first, weights.vocab_size)[33:], reference(model, second, weights.vocab_size)[20:]
    ])  # fmt: skip
    assert (got - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["torch", "native"])
def test_copied_blocks_continue_alike(tiny, name):
    directory, model = tiny("llama")
    weights = weights_of(directory)
    backend = backend_of(weights, name)
    tokens = prompt(4, 20)
    backend.forward(batch_of([(tokens[:16], 0, [1, 2])]))
    backend.copy_block(1, 30)
    got = backend.forward(batch_of([(tokens[16:], 16, [30, 31])]))
    assert (got - reference(model, tokens, weights.vocab_size)[16:]).abs().max() < 1e-4
