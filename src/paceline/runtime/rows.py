"""The rows of one forward pass, laid out for the backend. Knows turns and block tables, nothing of who chose them."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np

from paceline.runtime.backend import StepBatch
from paceline.runtime.scheduler import Turn


def lay_out(turns: SequenceOf[Turn]) -> tuple[StepBatch, list[int]]:
    """The batch of `turns` in their order, and for each the index of the first of its rows of logits, of which it has
    `turn.num_logit_rows`. A sequence's rows are its next known tokens, then the drafted ones."""
    token_ids: list[int] = []
    positions: list[int] = []
    sequence_of_row: list[int] = []
    logit_rows: list[int] = []
    offsets: list[int] = []
    block_tables = np.zeros((len(turns), max(len(turn.sequence.block_table) for turn in turns)), dtype=np.int32)
    for index, turn in enumerate(turns):
        sequence, drafted = turn.sequence, turn.draft.token_ids
        first = sequence.num_computed_tokens
        token_ids += sequence.token_ids[first : first + turn.num_known]
        token_ids += drafted
        positions += range(first, first + turn.num_rows)
        sequence_of_row += [index] * turn.num_rows
        block_tables[index, : len(sequence.block_table)] = sequence.block_table
        offsets.append(len(logit_rows))
        logit_rows += range(len(token_ids) - turn.num_logit_rows, len(token_ids))
    arrays = [np.array(values, dtype=np.int32) for values in (token_ids, positions, sequence_of_row, logit_rows)]
    return StepBatch(*arrays[:3], block_tables, arrays[3]), offsets
