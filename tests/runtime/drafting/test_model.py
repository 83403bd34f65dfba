from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.runtime.backend import StepBatch
from paceline.runtime.backend_fake import FakeBackend
from paceline.runtime.drafting.drafter import Draft
from paceline.runtime.drafting.model import ModelDrafter
from paceline.runtime.kv_cache import KVCache
from paceline.runtime.sampling import SamplingParams, TorchSamplingKernels, shape_logits
from paceline.runtime.sequence import Request, Sequence
from paceline.runtime.verify import Verifier

VOCAB = 30
EOS = 29
KERNELS = TorchSamplingKernels()
SAME_MODEL, OTHER_MODEL = 0, 1


def logits_after(token_ids: tuple[int, ...], model: int, vocab: int = VOCAB) -> torch.Tensor:
    """A model whose logits [vocab] depend on every token of the context. The other model mostly agrees with it."""
    logits = np.random.default_rng([7, *token_ids]).normal(0, 1.5, vocab)
    if model != SAME_MODEL:
        logits += np.random.default_rng([8, *token_ids]).normal(0, 0.8, vocab)
    logits[EOS % vocab] = -30.0
    return torch.from_numpy(logits.astype(np.float32))


class SlotBackend(FakeBackend):
    """The model above behind a paged KV cache: the context of a row is what its KV slots really hold. Records the
    context of every row, and spoils its last logits at the next call, as a real one does."""

    def __init__(self, model: int = SAME_MODEL, vocab_size: int = VOCAB, num_blocks: int = 64, max_rows: int = 16):
        super().__init__(vocab_size, num_blocks, block_size=4, max_rows=max_rows)
        self.model = model
        self.contexts: list[tuple[int, ...]] = []
        self._last_logits = torch.empty(0)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self._last_logits.fill_(float("nan"))
        self._last_logits = super().forward(batch)
        rows = range(len(batch.token_ids))
        self.contexts += [tuple(self._tokens[self._slots(batch, row)].tolist()) for row in rows]
        return self._last_logits

    def _logits(self, token_ids: list[int]) -> np.ndarray:
        return logits_after(tuple(token_ids), self.model, self.vocab_size).numpy()


def make_drafter(backend: SlotBackend, max_seq_len=200, target_vocab_size=VOCAB, prefix_cache=False):
    kv_cache = KVCache(backend.num_blocks, backend.block_size, backend.copy_block, enable_prefix_cache=prefix_cache)
    generator = np.random.default_rng(3)
    return ModelDrafter(backend, KERNELS, kv_cache, max_seq_len, target_vocab_size, generator, (EOS,)), kv_cache


GREEDY = SamplingParams(temperature=0.0)


def make_sequence(sampling=GREEDY, prompt=(1, 2, 3, 4, 5), request_id="r", output=(6,)) -> Sequence:
    sequence = Sequence(Request(request_id, tuple(prompt), sampling))
    sequence.token_ids.extend(output)
    return sequence


def check_blocks(drafter: ModelDrafter, kv_cache: KVCache) -> None:
    kv_cache.check([cached.block_table for cached in drafter._cached.values()])


def verify(sequence: Sequence, draft: Draft) -> int:
    """The target's verdict, appended; how many draft tokens it accepted."""
    rows = [logits_after(tuple(sequence.token_ids + draft.token_ids[:i]), SAME_MODEL) for i in range(len(draft) + 1)]
    verifier = Verifier(KERNELS, np.random.default_rng([len(sequence.token_ids)]), (EOS,))
    [verdict] = verifier.verify_batch([sequence], [draft], torch.stack(rows), [0])
    sequence.token_ids.extend(verdict.token_ids)
    return verdict.num_accepted


SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy_penalised": SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=9),
    "coupled": SamplingParams(seed=5),
    "coupled_shaped": SamplingParams(seed=6, temperature=0.7, top_p=0.9, presence_penalty=0.5, logit_bias={3: 2.0}),
    "rejection": SamplingParams(),
    "rejection_shaped": SamplingParams(temperature=1.4, top_k=8, repetition_penalty=1.2),
}


class TestSameModel:
    @pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
    @pytest.mark.parametrize("count", [1, 3, 7])
    def test_every_token_is_accepted_and_nothing_is_computed_twice(self, sampling, count):
        backend = SlotBackend()
        drafter, kv_cache = make_drafter(backend)
        sequence = make_sequence(sampling)
        for _ in range(8):
            before = len(backend.num_rows_per_call)
            [draft] = drafter.propose([sequence], [count])
            assert len(backend.num_rows_per_call) - before == count  # one pass per draft position, catching up included
            assert len(draft) == count
            assert verify(sequence, draft) == count
            check_blocks(drafter, kv_cache)
        assert len(set(backend.contexts)) == len(backend.contexts)
        assert len(backend.contexts) == len(sequence.token_ids) - 2  # all but the last draft token and the bonus token


class TestOtherModel:
    @pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["coupled_shaped"]], ids=["greedy", "coupled"])
    def test_after_rejections_drafts_are_those_of_a_fresh_drafter(self, sampling):
        backend = SlotBackend(OTHER_MODEL)
        drafter, kv_cache = make_drafter(backend)
        sequence = make_sequence(sampling)
        accepted = []
        for _ in range(25):
            [draft] = drafter.propose([sequence], [5])
            fresh, _ = make_drafter(SlotBackend(OTHER_MODEL))
            assert fresh.propose([sequence], [5]) == [draft]
            accepted.append(verify(sequence, draft))
            check_blocks(drafter, kv_cache)
        assert {0, 5} & set(accepted) and len(set(accepted)) > 1  # the rounds differed
        assert len(set(backend.contexts)) == len(backend.contexts)

    def test_catches_up_with_tokens_drafted_elsewhere(self):
        drafter, _ = make_drafter(SlotBackend(OTHER_MODEL))
        sequence = make_sequence()
        drafter.propose([sequence], [4])
        sequence.token_ids.extend([9, 8, 7, 6, 5, 4])
        fresh, _ = make_drafter(SlotBackend(OTHER_MODEL))
        assert drafter.propose([sequence], [4]) == fresh.propose([sequence], [4])

    def test_rejected_tokens_give_their_blocks_back(self):
        drafter, kv_cache = make_drafter(SlotBackend())
        sequence = make_sequence()
        [draft] = drafter.propose([sequence], [15])  # 6 known tokens and 14 of the drafted ones in 5 blocks
        assert kv_cache.num_available_blocks == 64 - 5
        sequence.token_ids.append((draft.token_ids[0] + 1) % EOS)
        drafter.propose([sequence], [1])
        assert kv_cache.num_available_blocks == 64 - 2

    def test_an_unchanged_sequence_gets_the_same_draft(self):
        drafter, _ = make_drafter(SlotBackend(OTHER_MODEL))
        sequence = make_sequence()
        assert drafter.propose([sequence], [4]) == drafter.propose([sequence], [4])


class TestRejectionProbabilities:
    def test_q_is_the_distribution_the_tokens_were_drawn_from(self):
        sampling = SAMPLINGS["rejection_shaped"]
        drafter, _ = make_drafter(SlotBackend(OTHER_MODEL))
        sequence = make_sequence(sampling)
        [draft] = drafter.propose([sequence], [6])
        assert draft.probabilities.shape == (6, VOCAB)
        for i in range(6):
            logits = logits_after(tuple(sequence.token_ids + draft.token_ids[:i]), OTHER_MODEL)[None]
            expected = torch.softmax(shape_logits(logits, sequence, draft.token_ids[:i], (EOS,)), 1)[0]
            torch.testing.assert_close(draft.probabilities[i], expected)
            assert draft.probabilities[i, draft.token_ids[i]] > 0

    def test_draws_vary(self):
        drafter, _ = make_drafter(SlotBackend(OTHER_MODEL))
        sequence = make_sequence(SAMPLINGS["rejection"])
        assert len({tuple(drafter.propose([sequence], [4])[0].token_ids) for _ in range(10)}) > 5


class TestBatch:
    def test_one_pass_per_position_for_all_and_the_same_drafts_as_alone(self):
        backend = SlotBackend(OTHER_MODEL, max_rows=64)
        drafter, kv_cache = make_drafter(backend)
        sequences = [
            make_sequence(sampling, prompt=range(1, 3 + i), request_id=name)
            for i, (name, sampling) in enumerate(SAMPLINGS.items())
            if "rejection" not in name
        ]
        limits = [3, 1, 4, 4]
        for _ in range(6):
            before = len(backend.num_rows_per_call)
            drafts = drafter.propose(sequences, limits)
            assert [len(draft) for draft in drafts] == limits
            assert backend.num_rows_per_call[before + 1 :] == [3, 3, 2]
            for sequence, draft, limit in zip(sequences, drafts, limits, strict=True):
                alone, _ = make_drafter(SlotBackend(OTHER_MODEL))
                assert alone.propose([sequence], [limit]) == [draft]
                verify(sequence, draft)
            check_blocks(drafter, kv_cache)

    @pytest.mark.parametrize("max_rows", [1, 2, 5])
    def test_prompts_are_computed_in_chunks_of_max_rows(self, max_rows):
        backend = SlotBackend(max_rows=max_rows)
        drafter, _ = make_drafter(backend)
        sequences = [make_sequence(prompt=range(1, 4 + 3 * i), request_id=str(i)) for i in range(4)]
        drafts = drafter.propose(sequences, [3] * 4)
        assert max(backend.num_rows_per_call) == max_rows
        assert [verify(sequence, draft) for sequence, draft in zip(sequences, drafts, strict=True)] == [3] * 4

    def test_a_shared_prompt_is_computed_once(self):
        backend = SlotBackend(max_rows=64)
        drafter, kv_cache = make_drafter(backend, prefix_cache=True)
        prompt = range(1, 22)
        sequences = [make_sequence(prompt=prompt, request_id=str(i), output=(i,)) for i in range(3)]
        for sequence in sequences:
            [draft] = drafter.propose([sequence], [2])
            assert verify(sequence, draft) == 2
        assert len(backend.contexts) == (22 + 1) + 2 * (2 + 1)  # 20 of the 22 tokens are in full blocks
        check_blocks(drafter, kv_cache)


class TestRelease:
    @pytest.mark.parametrize("prefix_cache", [False, True])
    def test_preempted_sequences_start_again_and_blocks_come_back(self, prefix_cache):
        drafter, kv_cache = make_drafter(SlotBackend(OTHER_MODEL), prefix_cache=prefix_cache)
        sequence, other = make_sequence(request_id="a"), make_sequence(request_id="b", prompt=(7, 7))
        available = kv_cache.num_available_blocks
        for _ in range(5):
            expected = drafter.propose([sequence, other], [4, 4])
            drafter.release(sequence)
            drafter.release(sequence)
            check_blocks(drafter, kv_cache)
            drafts = drafter.propose([other, sequence], [4, 4])
            assert drafts == expected[::-1]
            verify(other, drafts[0])
            verify(sequence, drafts[1])
        drafter.release(sequence)
        drafter.release(other)
        assert kv_cache.num_available_blocks == available
        kv_cache.check([])

    def test_releasing_an_unknown_sequence_is_fine(self):
        make_drafter(SlotBackend())[0].release(make_sequence())


class TestLimits:
    def test_zero_limits_cost_nothing(self):
        backend = SlotBackend()
        drafter, _ = make_drafter(backend)
        assert drafter.propose([make_sequence()], [0]) == [Draft()]
        assert drafter.propose([], []) == []
        assert backend.num_rows_per_call == []

    def test_a_full_cache_shortens_drafts_and_never_fails(self):
        backend = SlotBackend(num_blocks=4)  # 16 tokens
        drafter, kv_cache = make_drafter(backend)
        first, second = make_sequence(request_id="a"), make_sequence(request_id="b")
        drafts = drafter.propose([first, second], [7, 7])
        assert [len(draft) for draft in drafts] == [3, 3]  # 8 tokens each: 6 known, 2 drafted, and 1 from their logits
        assert verify(first, drafts[0]) == 3
        assert drafter.propose([first], [7]) == [Draft()]
        check_blocks(drafter, kv_cache)
        drafter.release(second)
        [draft] = drafter.propose([first], [3])
        assert verify(first, draft) == 3

    def test_a_prompt_that_does_not_fit_is_not_drafted_for(self):
        drafter, kv_cache = make_drafter(SlotBackend(num_blocks=2))
        assert drafter.propose([make_sequence(prompt=range(20))], [4]) == [Draft()]
        check_blocks(drafter, kv_cache)

    def test_max_seq_len_is_never_passed(self):
        backend = SlotBackend()
        drafter, _ = make_drafter(backend, max_seq_len=10)
        sequence = make_sequence()
        [draft] = drafter.propose([sequence], [7])
        assert len(draft) == 4
        sequence.token_ids.extend([1] * 4)
        assert drafter.propose([sequence], [7]) == [Draft()]
        assert max(len(context) for context in backend.contexts) < 10

    @pytest.mark.parametrize("name", ["greedy", "coupled", "rejection"])
    def test_ids_the_target_does_not_know_are_never_drafted(self, name):
        drafter, _ = make_drafter(SlotBackend(vocab_size=500), target_vocab_size=12)
        sequences = [make_sequence(SAMPLINGS[name], prompt=(i, i), request_id=str(i)) for i in range(8)]
        for draft in drafter.propose(sequences, [5] * 8):
            assert len(draft) == 5
            assert max(draft.token_ids) < 12
            assert draft.probabilities is None or draft.probabilities.shape == (5, 12)

    def test_ids_the_draft_model_does_not_know_stop_drafting(self):
        drafter, kv_cache = make_drafter(SlotBackend(vocab_size=10))
        strange, plain = make_sequence(prompt=(1, 25, 2), request_id="a"), make_sequence(request_id="b")
        drafts = drafter.propose([strange, plain], [3, 3])
        assert [len(draft) for draft in drafts] == [0, 3]
        plain.token_ids.append(11)
        assert drafter.propose([strange, plain], [3, 3]) == [Draft(), Draft()]
        check_blocks(drafter, kv_cache)

    @pytest.mark.parametrize(("changes", "length"), [({}, 1), ({"ignore_eos": True}, 4), ({"min_tokens": 3}, 3)])
    def test_drafts_end_with_the_end_of_sequence_token(self, changes, length):
        # The bias makes EOS the likeliest token wherever it is allowed.
        sampling = SamplingParams(temperature=0.0, logit_bias={EOS: 100.0}, **changes)
        drafter, _ = make_drafter(SlotBackend())
        [draft] = drafter.propose([make_sequence(sampling, output=(6,))], [4])
        assert len(draft) == length
        assert draft.token_ids[-1] == EOS

    def test_drafts_end_with_a_stop_token(self):
        sampling = SamplingParams(temperature=0.0, logit_bias={4: 100.0}, stop_token_ids=(4,))
        drafter, _ = make_drafter(SlotBackend())
        assert drafter.propose([make_sequence(sampling)], [5])[0].token_ids == [4]
