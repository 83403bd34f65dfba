"""Paged attention against a plain loop over positions, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.model.attention import paged_attention

NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, GROUP, HEAD_DIM = 12, 4, 2, 3, 8


def cache(seed: int) -> torch.Tensor:
    return torch.randn((NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM), generator=torch.Generator().manual_seed(seed))


def plain_attention(query, position, head, keys, values, table, scale, softcap, window):
    first = 0 if window is None else max(0, position - window + 1)
    scores, seen = [], []
    for at in range(first, position + 1):
        slot = table[at // BLOCK_SIZE], at % BLOCK_SIZE, head // GROUP
        score = float(query.double() @ keys[slot].double()) * scale
        scores.append(score if softcap is None else softcap * math.tanh(score / softcap))
        seen.append(values[slot].double())
    return torch.softmax(torch.tensor(scores, dtype=torch.float64), dim=0) @ torch.stack(seen)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_attention_equals_a_loop_over_visible_positions(window, softcap):
    keys, values, table = cache(1), cache(2), torch.tensor([7, 0, 11, 3, 5])
    positions = torch.arange(9, 18)
    queries = torch.randn((9, KV_HEADS * GROUP, HEAD_DIM), generator=torch.Generator().manual_seed(3))
    got = paged_attention(queries, positions, keys, values, table, scale=0.4, softcap=softcap, window=window)
    assert got.shape == queries.shape
    for row, position in enumerate(positions.tolist()):
        for head in range(KV_HEADS * GROUP):
            expected = plain_attention(
                queries[row, head], position, head, keys, values, table.tolist(), 0.4, softcap, window
            )
            torch.testing.assert_close(got[row, head].double(), expected, rtol=0, atol=1e-5)


def test_nothing_beyond_the_newest_position_is_read():
    """Slots that a former owner left broken, in the last block and in unused table entries, do not leak."""
    keys, values = cache(1), cache(2)
    for tensor in (keys, values):
        tensor[0] = float("nan")
        tensor[3, 2:] = float("nan")
    queries = torch.ones((1, KV_HEADS * GROUP, HEAD_DIM))
    table = torch.tensor([5, 3, 0, 0])
    got = paged_attention(queries, torch.tensor([5]), keys, values, table, scale=1.0, softcap=None, window=None)
    assert got.isfinite().all()
