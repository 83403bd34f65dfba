"""The fake backend must notice the mistakes it is there to catch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.runtime.backend import StepBatch
from paceline.runtime.backend_fake import FakeBackend


def batch(*rows, tables, logit_rows=None):
    """`rows` are (token id, position, sequence)."""
    token_ids, positions, sequence_of_row = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    logit_rows = range(len(rows)) if logit_rows is None else logit_rows
    tables = np.array(tables, dtype=np.int32)
    return StepBatch(token_ids, positions, sequence_of_row, tables, np.array(logit_rows, dtype=np.int32))


def backend(**options):
    return FakeBackend(**{"vocab_size": 50, "num_blocks": 8, "block_size": 2} | options)


def rows(token_ids, start=0, sequence=0):
    return [(token_id, start + index, sequence) for index, token_id in enumerate(token_ids)]


def test_logits_do_not_depend_on_chunks_blocks_or_neighbours():
    whole = backend().forward(batch(*rows([3, 1, 4, 1, 5]), tables=[[0, 1, 2]]))
    chunked = backend()
    first = chunked.forward(batch(*rows([3, 1, 4]), *rows([9, 9], sequence=1), tables=[[7, 5, 0], [2, 0, 0]]))
    second = chunked.forward(batch(*rows([9], 2, 1), *rows([1, 5], 3), tables=[[7, 5, 3], [2, 6, 0]]))
    assert torch.equal(torch.cat([first[:3], second[1:]]), whole)
    assert (whole.dtype, whole.shape) == (torch.float32, (5, 50))


def test_logits_depend_on_every_token_of_the_context_or_on_the_last_few():
    one, other = ([8, 2, 3, 4], [9, 2, 3, 4])
    for context, same in ((None, False), (4, False), (3, True)):
        logits = [backend(context=context).forward(batch(*rows(ids), tables=[[0, 1]])) for ids in (one, other)]
        assert torch.equal(logits[0][3], logits[1][3]) == same


def test_only_wanted_rows_have_logits():
    logits = backend().forward(batch(*rows([1, 2, 3]), tables=[[0, 1]], logit_rows=[2]))
    assert torch.equal(logits, backend().forward(batch(*rows([1, 2, 3]), tables=[[0, 1]]))[2:])
    assert backend().forward(batch(*rows([1, 2, 3]), tables=[[0, 1]], logit_rows=[])).shape == (0, 50)


def test_a_script_is_followed_from_its_prompt_and_left_where_the_text_differs():
    fake = backend(script={(1, 2): [7, 8]}, num_blocks=20)
    logits = fake.forward(batch(*rows([1, 2, 7, 8]), tables=[[0, 1]]))
    assert logits.argmax(dim=1).tolist()[1:3] == [7, 8]
    unscripted = backend().forward(batch(*rows([1, 2, 7, 8]), tables=[[0, 1]]))
    assert torch.equal(logits[[0, 3]], unscripted[[0, 3]])
    strayed = fake.forward(batch(*rows([1, 2, 6]), tables=[[4, 5]]))
    assert torch.equal(strayed[2:], backend().forward(batch(*rows([1, 2, 6]), tables=[[4, 5]]))[2:])


def test_copied_blocks_serve_as_well():
    fake = backend()
    fake.forward(batch(*rows([1, 2, 3]), tables=[[0, 1]]))
    fake.copy_block(1, 6)
    logits = fake.forward(batch(*rows([4], 3), tables=[[0, 6]]))
    assert torch.equal(logits, backend().forward(batch(*rows([1, 2, 3, 4]), tables=[[0, 1]]))[3:])


@pytest.mark.parametrize(
    ("second", "position"),
    [
        (batch(*rows([5], 3), tables=[[0, 2]]), 2),  # a block never written
        (batch(*rows([5], 3), tables=[[1, 1]]), 0),  # the wrong block
        (batch(*rows([9], 1), tables=[[0, 1]], logit_rows=[]), None),  # overwritten: seen only by those that read on
    ],
)
def test_a_context_that_is_not_what_was_computed_is_noticed(second, position):
    fake = backend()
    fake.forward(batch(*rows([1, 2, 3]), tables=[[0, 1]]))
    if position is None:
        fake.forward(second)
        second, position = batch(*rows([4], 3), tables=[[0, 1]]), 2
    with pytest.raises(AssertionError, match=f"position {position} was computed in another context"):
        fake.forward(second)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (batch(*rows([1]), *rows([1], sequence=1), tables=[[0], [0]]), "two rows write to one slot"),
        (batch(*rows([50]), tables=[[0]]), "outside the vocabulary"),
        (batch(*rows([-1]), tables=[[0]]), "outside the vocabulary"),
        (batch(*rows([1, 2, 3]), tables=[[0, 1]]), "3 rows, at most 2 fit"),
    ],
)
def test_impossible_batches_are_refused(bad, message):
    with pytest.raises(AssertionError, match=message):
        backend(max_rows=2).forward(bad)
