"""Engines on the fake backend, a tokenizer of bytes, and drafters of every temperament, for tests of the runtime."""

from __future__ import annotations

import random

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from paceline.runtime.backend_fake import FakeBackend
from paceline.runtime.controller import FixedController
from paceline.runtime.drafting.drafter import Draft
from paceline.runtime.engine import Engine, EngineLimits
from paceline.runtime.sampling import TorchSamplingKernels
from paceline.runtime.verify import Verifier

EOS = 256
VOCAB_SIZE = 257  # the bytes, and an end


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Token i is byte i; token 256 is special."""
    printable = list(range(33, 127)) + list(range(161, 173)) + list(range(174, 256))
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    assert set(vocab) == set(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


TOKENIZER = byte_tokenizer()


def make_engine(backend=None, *, drafter=None, num_draft_tokens=4, **limits):
    """An engine with one drafter (None: speculation is off), called "test"."""
    sizes = {"max_seq_len": 120, "max_batch_size": 8, "max_num_tokens": 64} | limits
    return Engine(
        backend=backend or FakeBackend(VOCAB_SIZE, num_blocks=300),
        tokenizer=TOKENIZER,
        limits=EngineLimits(**sizes),
        drafters={} if drafter is None else {"test": drafter},
        default_method=None if drafter is None else "test",
        controller=FixedController(num_draft_tokens),
        verifier=Verifier(TorchSamplingKernels(), np.random.default_rng(0), [EOS]),
        eos_token_ids=[EOS],
    )


class ScriptedDrafter:
    """Proposes what `truth` (sequence id -> output) says comes next, each token replaced by a random one with
    probability `error_rate`: 0 is an oracle, 1 is hostile. Keeps a record of the calls it gets."""

    def __init__(self, truth=None, error_rate=0.0, obeys_limits=True, seed=0):
        self.truth = truth or {}
        self.error_rate = error_rate
        self.obeys_limits = obeys_limits
        self.random = random.Random(seed)
        self.proposed: list[tuple[str, int, int]] = []  # sequence id, output tokens known, limit
        self.observed: list[tuple[str, int, int, int]] = []  # sequence id, known, drafted, accepted
        self.released: list[str] = []

    def propose(self, sequences, limits):
        return [self._draft(sequence, limit) for sequence, limit in zip(sequences, limits, strict=True)]

    def _draft(self, sequence, limit):
        self.proposed.append((sequence.sequence_id, sequence.num_output_tokens, limit))
        start = sequence.num_output_tokens
        length = limit if self.obeys_limits else limit + 5
        expected = list(self.truth.get(sequence.sequence_id, []))[start : start + length]
        expected += [self.random.randrange(VOCAB_SIZE) for _ in range(length - len(expected))]
        wrong = [self.random.random() < self.error_rate for _ in expected]
        token_ids = [self.random.randrange(VOCAB_SIZE) if bad else t for t, bad in zip(expected, wrong, strict=True)]
        return Draft(token_ids, source="draft")

    def observe(self, sequence, draft, verdict):
        self.observed.append((sequence.sequence_id, len(sequence.token_ids), len(draft), verdict.num_accepted))

    def release(self, sequence):
        self.released.append(sequence.sequence_id)
