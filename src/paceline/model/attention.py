"""Attention over a paged KV cache, in PyTorch: the reference of kernels/attention.h, and what runs on GPUs.

Knows queries, cache blocks and positions; knows nothing of layers or weights.
"""

from __future__ import annotations

import torch


def paged_attention(
    queries: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> torch.Tensor:
    """Attend from rows of one sequence to its cached positions up to their own.

    `queries` float32 [rows, heads, head_dim]; `positions` int64 [rows]; `keys` and `values` [num_blocks, block_size,
    kv_heads, head_dim]; `block_table` int64 [blocks]. A row sees positions p - window + 1 .. p. Returns float32
    [rows, heads, head_dim].
    """
    num_rows, num_heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    length = int(positions.max()) + 1
    blocks = block_table[: -(-length // keys.shape[1])]
    k = keys[blocks].reshape(-1, kv_heads, head_dim)[:length].float()
    v = values[blocks].reshape(-1, kv_heads, head_dim)[:length].float()
    q = queries.view(num_rows, kv_heads, num_heads // kv_heads, head_dim)
    scores = torch.einsum("rhgd,thd->hgrt", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(length, device=queries.device)
    visible = at[None] <= positions[:, None]
    if window is not None:
        visible &= at[None] > positions[:, None] - window
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return torch.einsum("hgrt,thd->rhgd", weights, v).reshape(num_rows, num_heads, head_dim)
