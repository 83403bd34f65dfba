from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from paceline.runtime.drafting.drafter import Draft
from paceline.runtime.sampling import SamplingParams, TorchSamplingKernels, sample_index, shape_logits
from paceline.runtime.sequence import Request, Sequence
from paceline.runtime.verify import Verifier, expected_acceptance, verify_match, verify_rejection

VOCAB = 6
KERNELS = TorchSamplingKernels()
EOS = (0,)


def make_sequence(sampling: SamplingParams, output=(), request_id="r") -> Sequence:
    sequence = Sequence(Request(request_id, (1, 2), sampling))
    sequence.token_ids.extend(output)
    return sequence


def model_logits(token_ids: list[int], vocab: int = VOCAB, model: int = 0) -> torch.Tensor:
    """A toy language model: logits [vocab] that depend on the last two tokens and on which model it is."""
    return table_of_logits(tuple(token_ids[-2:]), vocab, model)


@functools.cache
def table_of_logits(context: tuple[int, ...], vocab: int, model: int) -> torch.Tensor:
    generator = np.random.default_rng([model, *context])
    return torch.from_numpy(generator.normal(0, 1.0, vocab).astype(np.float32))


def target_rows(sequence: Sequence, draft: list[int], vocab: int = VOCAB) -> torch.Tensor:
    return torch.stack([model_logits(sequence.token_ids + draft[:i], vocab) for i in range(len(draft) + 1)])


class TestMatch:
    @given(st.lists(st.integers(0, 2), max_size=8), st.data())
    def test_is_plain_decoding_up_to_the_first_difference(self, draft, data):
        target = data.draw(st.lists(st.integers(0, 2), min_size=len(draft) + 1, max_size=len(draft) + 1))
        verdict = verify_match(draft, target)
        n = verdict.num_accepted
        assert verdict.token_ids == target[: n + 1]
        assert draft[:n] == target[:n]
        assert n == len(draft) or draft[n] != target[n]


@st.composite
def rejection_cases(draw):
    k = draw(st.integers(0, 5))
    weight = st.sampled_from([0.0, 1e-6, 0.2, 1.0, 30.0])

    def distributions(rows, width):
        table = draw(st.lists(st.lists(weight, min_size=width, max_size=width), min_size=rows, max_size=rows))
        table = torch.tensor(table, dtype=torch.float32).reshape(rows, width)
        table[:, 0] += (table.sum(1) == 0).float()
        return table / table.sum(1, keepdim=True)

    p = distributions(k + 1, VOCAB)
    q = distributions(k, draw(st.integers(VOCAB - 2, VOCAB + 2)))
    uniforms = draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=k + 1, max_size=k + 1))
    token_ids = [sample_index(q[i], draw(st.floats(0, 1, exclude_max=True))) for i in range(k)]
    return Draft(token_ids, q if k and draw(st.booleans()) else None), p, uniforms


class TestRejection:
    @given(rejection_cases())
    @settings(max_examples=300, deadline=None)
    def test_invariants(self, case):
        draft, p, uniforms = case
        verdict = verify_rejection(draft, p, uniforms)
        n = verdict.num_accepted
        assert 0 <= n <= len(draft)
        assert len(verdict.token_ids) == n + 1
        assert verdict.token_ids[:n] == draft.token_ids[:n]
        assert all(p[i, token_id] > 0 for i, token_id in enumerate(verdict.token_ids))
        for i in range(min(n + 1, len(draft))):
            token_id = draft.token_ids[i]
            q = 1.0 if draft.probabilities is None else float(draft.probabilities[i, token_id])
            ratio = float(p[i, token_id]) / q if token_id < VOCAB else 0.0
            assert (uniforms[i] < ratio) == (i < n) or abs(uniforms[i] - ratio) < 1e-6
        if n < len(draft) and draft.probabilities is None:
            assert verdict.token_ids[n] != draft.token_ids[n]

    def test_the_same_distribution_is_always_accepted(self):
        p = torch.softmax(torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)), 1)
        draft = Draft([1, 2, 3], p[:3])
        assert verify_rejection(draft, p, [0.999999, 0.999999, 0.999999, 0.5]).num_accepted == 3

    def test_nan_does_not_crash(self):
        verdict = verify_rejection(Draft([1], None), torch.full((2, VOCAB), float("nan")), [0.5, 0.5])
        assert 0 <= verdict.token_ids[-1] < VOCAB


def hostile_distribution(kind: str, p: torch.Tensor) -> torch.Tensor | None:
    """q as a function of p = the target's distribution at that position; None for one-hot."""
    if kind == "equal":
        return p.clone()
    if kind == "disjoint":  # all its mass where the target, after top-p, has none, if there is such a place
        q = (p == 0).float()
        return q / q.sum() if q.sum() else (p == p.min()).float() / (p == p.min()).sum()
    if kind == "peaked_wrong":
        q = torch.full_like(p, 0.02)
        q[p.argmin()] = 1.0
        return q / q.sum()
    if kind == "uniform":
        return torch.full_like(p, 1 / len(p))
    return None


class TestLossless:
    """The first two tokens generated, over and over, against the target's joint distribution of two tokens."""

    @pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
    @pytest.mark.parametrize("top_p", [1.0, 0.8])
    @pytest.mark.parametrize(
        "kind", ["equal", "disjoint", "peaked_wrong", "uniform", "one_hot_likely", "one_hot_unlikely"]
    )
    def test_joint_distribution_of_two_tokens(self, kind, temperature, top_p):
        sampling = SamplingParams(temperature=temperature, top_p=top_p)
        generator = np.random.default_rng([len(kind), int(temperature * 10), int(top_p * 10)])
        verifier = Verifier(KERNELS, generator, EOS)
        shaped = self.target_distributions(sampling)
        counts = np.zeros((VOCAB, VOCAB))
        draws = 2000
        for _ in range(draws):
            sequence = make_sequence(sampling)
            while sequence.num_output_tokens < 2:
                draft = self.make_draft(kind, sequence, shaped, generator)
                rows = target_rows(sequence, draft.token_ids)
                [verdict] = verifier.verify_batch([sequence], [draft], rows, [0])
                sequence.token_ids.extend(verdict.token_ids)
            counts[sequence.token_ids[2], sequence.token_ids[3]] += 1
        first = shaped[1, 2]
        joint = np.array([[float(first[a] * shaped[2, a][b]) for b in range(VOCAB)] for a in range(VOCAB)], np.float64)
        assert counts[joint == 0].sum() == 0
        self.assert_distributed(counts[joint > 0], joint[joint > 0] * draws)

    @staticmethod
    def target_distributions(sampling) -> dict[tuple[int, int], torch.Tensor]:
        result = {}
        for context in itertools.product(range(VOCAB), repeat=2):
            sequence = make_sequence(sampling, context)
            logits = model_logits(list(context))[None]
            result[context] = torch.softmax(shape_logits(logits, sequence, [], EOS), 1)[0]
        return result

    @staticmethod
    def make_draft(kind, sequence, shaped, generator) -> Draft:
        token_ids, rows = [], []
        for _ in range(2):
            p = shaped[tuple((sequence.token_ids + token_ids)[-2:])]
            q = hostile_distribution(kind, p)
            if q is None:
                token_ids.append(int(p.argmax() if kind == "one_hot_likely" else p.argmin()))
            else:
                rows.append(q)
                token_ids.append(sample_index(q, generator.random()))
        return Draft(token_ids, torch.stack(rows) if rows else None)

    @staticmethod
    def assert_distributed(observed, expected):
        """Chi-square with cells below five expected pooled; the random numbers are fixed, so this is no coin toss."""
        small = expected < 5
        if small.any():
            observed = np.append(observed[~small], observed[small].sum())
            expected = np.append(expected[~small], expected[small].sum())
        if len(expected) > 1:
            assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3

    def test_the_test_can_fail(self):
        """A verifier that accepts whatever is drafted is caught by the same chi-square."""
        shaped = self.target_distributions(SamplingParams())
        generator = np.random.default_rng(0)
        q = hostile_distribution("uniform", shaped[1, 2])
        counts = np.bincount([sample_index(q, generator.random()) for _ in range(3000)], minlength=VOCAB)
        with pytest.raises(AssertionError):
            self.assert_distributed(counts, shaped[1, 2].double().numpy() * 3000)


def drafted_by(kind: str, sequence: Sequence, count: int, vocab: int) -> Draft:
    """Toy drafters, from clairvoyant to hopeless, drawing coupled noise or none."""
    token_ids: list[int] = []
    for i in range(count):
        known = sequence.token_ids + token_ids
        if kind == "same_model" or kind == "other_model":
            logits = model_logits(known, vocab, model=0 if kind == "same_model" else 1)[None]
            logits = logits if kind == "same_model" else 0.7 * model_logits(known, vocab)[None] + 0.3 * logits
            shaped = shape_logits(logits, sequence, token_ids, EOS)
            if sequence.sampling.mode == "greedy":
                token_ids += KERNELS.argmax(shaped)
            else:
                token_ids += KERNELS.gumbel_argmax(shaped, sequence.sampling.seed, [sequence.num_output_tokens + i])
        else:
            token_ids.append((7 * len(known)) % vocab)
    return Draft(token_ids)


def generate(sampling: SamplingParams, kind: str, count: int, num_tokens=40, vocab=50) -> tuple[list[int], float]:
    """Decode one sequence; its output and the share of drafted tokens accepted."""
    verifier = Verifier(KERNELS, np.random.default_rng(0), EOS)
    sequence = make_sequence(sampling)
    drafted = accepted = 0
    while sequence.num_output_tokens < num_tokens:
        draft = drafted_by(kind, sequence, count, vocab)
        [verdict] = verifier.verify_batch([sequence], [draft], target_rows(sequence, draft.token_ids, vocab), [0])
        drafted += len(draft)
        accepted += verdict.num_accepted
        sequence.token_ids.extend(verdict.token_ids)
    return sequence.output_token_ids[:num_tokens], accepted / max(drafted, 1)


PENALISED = {"repetition_penalty": 1.1, "frequency_penalty": 0.4, "presence_penalty": 0.2, "logit_bias": {3: 1.0},
             "min_tokens": 20, "top_p": 0.95}  # fmt: skip


class TestTokenIdentical:
    @pytest.mark.parametrize("changes", [{}, PENALISED], ids=["plain", "penalised"])
    @pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
    def test_any_drafter_gives_what_no_drafter_gives(self, temperature, changes):
        sampling = SamplingParams(temperature=temperature, seed=1234, **changes)
        plain, _ = generate(sampling, "none", 0)
        for kind in ("same_model", "other_model", "hopeless"):
            for count in (1, 3, 7):
                output, acceptance = generate(sampling, kind, count)
                assert output == plain
                assert acceptance == 1.0 or kind != "same_model"

    def test_seeds_differ(self):
        outputs = {tuple(generate(SamplingParams(seed=seed), "none", 0)[0]) for seed in range(5)}
        assert len(outputs) == 5


class CountingKernels(TorchSamplingKernels):
    def __init__(self):
        self.argmax_rows: list[int] = []

    def argmax(self, logits):
        self.argmax_rows.append(len(logits))
        return super().argmax(logits)


class TestVerifier:
    def test_a_mixed_batch_is_each_sequence_alone_and_plain_greedy_is_one_call(self):
        samplings = [SamplingParams(temperature=0.0), SamplingParams(seed=3), SamplingParams(temperature=0.0),
                     SamplingParams(temperature=0.0, logit_bias={2: 9.0}), SamplingParams(seed=4, top_k=3)]  # fmt: skip
        sequences = [make_sequence(s, output=(i,), request_id=str(i)) for i, s in enumerate(samplings)]
        drafts = [drafted_by("other_model" if i % 2 else "hopeless", s, i, VOCAB) for i, s in enumerate(sequences)]
        rows = [target_rows(s, d.token_ids) for s, d in zip(sequences, drafts, strict=True)]
        offsets = np.cumsum([0, *(len(r) for r in rows[:-1])]).tolist()
        logits = torch.cat(rows)
        before = logits.clone()
        kernels = CountingKernels()
        verdicts = Verifier(kernels, np.random.default_rng(0), EOS).verify_batch(sequences, drafts, logits, offsets)
        assert kernels.argmax_rows == [4, 1 + 3]  # the biased sequence alone, the two plain ones together
        assert torch.equal(logits, before)
        for sequence, draft, row, verdict in zip(sequences, drafts, rows, verdicts, strict=True):
            alone = Verifier(KERNELS, np.random.default_rng(0), EOS)
            assert alone.verify_batch([sequence], [draft], row, [0]) == [verdict]

    def test_empty_batch(self):
        assert Verifier(KERNELS, np.random.default_rng(0), EOS).verify_batch([], [], torch.empty(0, VOCAB), []) == []

    def test_min_tokens_counts_the_draft(self):
        sequence = make_sequence(SamplingParams(temperature=0.0, min_tokens=3), output=(4,))
        logits = torch.zeros(4, VOCAB)
        logits[:, 0] = 9.0  # EOS everywhere
        logits[:, 5] = 1.0
        verifier = Verifier(KERNELS, np.random.default_rng(0), EOS)
        [verdict] = verifier.verify_batch([sequence], [Draft([5, 5, 5])], logits, [0])
        assert verdict.token_ids == [5, 5, 0]


class TestExpectedAcceptance:
    @pytest.mark.parametrize("seed", [0, 1])
    def test_against_simulation(self, seed):
        generator = torch.Generator().manual_seed(seed)
        p_logits, q_logits = torch.randn(2, 1, 8, generator=generator) * 1.5
        p, q = torch.softmax(p_logits[0], 0), torch.softmax(q_logits[0], 0)
        draws = 20_000
        positions = list(range(draws))
        target = KERNELS.gumbel_argmax(p_logits.expand(draws, 8), seed, positions)
        drafted = KERNELS.gumbel_argmax(q_logits.expand(draws, 8), seed, positions)
        coupled = np.mean([a == b for a, b in zip(target, drafted, strict=True)])
        uniforms = np.random.default_rng(seed).random((draws // 4, 3))
        rejection = np.mean(
            [
                verify_rejection(Draft([sample_index(q, u[0])], q[None]), torch.stack([p, p]), u[1:]).num_accepted
                for u in uniforms
            ]
        )
        expected_rejection, expected_coupled = expected_acceptance(p, q)
        assert coupled == pytest.approx(expected_coupled, abs=0.015)
        assert rejection == pytest.approx(expected_rejection, abs=0.03)

    def test_extremes(self):
        p = torch.tensor([0.5, 0.5, 0.0, 0.0])
        assert expected_acceptance(p, p) == pytest.approx((1.0, 1.0))
        assert expected_acceptance(p, p.flip(0)) == (0.0, 0.0)
        assert expected_acceptance(p, torch.tensor([0.5, 0.0, 0.0, 0.5])) == pytest.approx((0.5, 1 / 3))

    @given(st.lists(st.floats(0.01, 1), min_size=2, max_size=9), st.data())
    @settings(deadline=None)
    def test_coupled_lies_between_the_bound_and_rejection(self, weights, data):
        others = data.draw(st.lists(st.floats(0.01, 1), min_size=len(weights), max_size=len(weights)))
        p, q = torch.tensor(weights).double(), torch.tensor(others).double()
        rejection, coupled = expected_acceptance(p / p.sum(), q / q.sum())
        assert rejection / (2 - rejection) - 1e-9 <= coupled <= rejection + 1e-9
