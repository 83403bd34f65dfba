from __future__ import annotations

import numpy as np

from paceline.runtime.drafting.drafter import Draft
from paceline.runtime.rows import lay_out
from paceline.runtime.scheduler import Turn
from paceline.runtime.sequence import Request, Sequence


def sequence(token_ids, num_computed_tokens, block_table):
    made = Sequence(Request("r", tuple(token_ids)))
    made.num_computed_tokens, made.block_table = num_computed_tokens, block_table
    return made


def test_rows_are_known_tokens_then_drafted_ones_with_logits_where_tokens_are_judged_or_chosen():
    decoding = Turn(sequence([1, 2, 3], 2, [7]), 1, Draft([10, 11]), yields_token=True)
    part_of_prompt = Turn(sequence([4, 5, 6, 7, 8], 1, [3, 9, 2]), 2, Draft(), yields_token=False)
    end_of_prompt = Turn(sequence([9, 9, 9], 0, [4, 5]), 3, Draft(), yields_token=True)
    batch, offsets = lay_out([decoding, part_of_prompt, end_of_prompt])
    assert batch.token_ids.tolist() == [3, 10, 11, 5, 6, 9, 9, 9]
    assert batch.positions.tolist() == [2, 3, 4, 1, 2, 0, 1, 2]
    assert batch.sequence_of_row.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert batch.block_tables.tolist() == [[7, 0, 0], [3, 9, 2], [4, 5, 0]]
    assert batch.logit_rows.tolist() == [0, 1, 2, 7]
    assert offsets == [0, 3, 3], "the second turn has no logits"
    assert {array.dtype for array in vars(batch).values()} == {np.dtype(np.int32)}


def test_a_step_may_want_no_logits():
    batch, offsets = lay_out([Turn(sequence([4, 5, 6], 0, [0]), 2, Draft(), yields_token=False)])
    assert (batch.logit_rows.tolist(), batch.logit_rows.dtype, offsets) == ([], np.int32, [0])
