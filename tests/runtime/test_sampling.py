from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paceline.errors import RequestError
from paceline.runtime.sampling import SamplingParams, TorchSamplingKernels, sample_index, shape_logits
from paceline.runtime.sequence import Request, Sequence

KERNELS = TorchSamplingKernels()


def make_sequence(sampling: SamplingParams, prompt=(1, 2, 3), output=()) -> Sequence:
    sequence = Sequence(Request("r", tuple(prompt), sampling))
    sequence.token_ids.extend(output)
    return sequence


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, scale, (rows, vocab)).astype(np.float32))


class TestParams:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "1"),
            ("temperature", True), ("temperature", None),
            ("top_p", 0.0), ("top_p", 1.01), ("top_p", math.nan),
            ("top_k", -2), ("top_k", 1.5), ("top_k", True),
            ("min_p", -0.01), ("min_p", 1.1),
            ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", math.nan),
            ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.inf),
            ("logit_bias", {5: 101.0}), ("logit_bias", {-1: 1.0}), ("logit_bias", {"5": 1.0}),
            ("logit_bias", {5: math.nan}), ("logit_bias", [5]), ("logit_bias", None),
            ("seed", 1 << 63), ("seed", 1.0),
            ("stop", ("",)), ("stop", "end"), ("stop", (b"x",)), ("stop_token_ids", (-1,)), ("stop_token_ids", 7),
            ("logit_bias", dict.fromkeys(range(1025), 0.0)), ("stop_token_ids", (5,) * 1025), ("stop", ("x",) * 1025),
            ("max_tokens", 0), ("max_tokens", -1), ("min_tokens", -1), ("n", 0), ("n", 129), ("logprobs", -1),
            ("logprobs", 21), ("prompt_logprobs", 21), ("bad_words", ((),)), ("bad_words", ((1, -1),)),
            ("bad_words", [(1,)]), ("allowed_token_ids", ()), ("allowed_token_ids", (-1,)), ("ignore_eos", "no"),
            ("skip_special_tokens", None), ("include_stop_str_in_output", 1),
        ],
    )  # fmt: skip
    def test_refused_by_name_with_the_value_and_a_hint(self, field, value):
        with pytest.raises(RequestError) as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field
        assert f"`{field}`" in caught.value.message
        assert caught.value.hint
        assert len(caught.value.message) < 300

    def test_bounds_themselves_are_accepted(self):
        SamplingParams(
            temperature=0.0, top_p=1.0, top_k=-1, min_p=1.0, presence_penalty=-2, frequency_penalty=2,
            seed=-(1 << 63), max_tokens=1, min_tokens=1, n=128, logprobs=0, logit_bias={0: -100, 7: 100},
        )  # fmt: skip

    def test_min_tokens_above_max_tokens_is_refused(self):
        with pytest.raises(RequestError) as caught:
            SamplingParams(max_tokens=4, min_tokens=5)
        assert caught.value.field == "min_tokens"

    def test_modes(self):
        assert SamplingParams(temperature=0.0).mode == "greedy"
        assert SamplingParams(temperature=0.0, seed=3).mode == "greedy"
        assert SamplingParams(seed=0).mode == "coupled"
        assert SamplingParams().mode == "rejection"

    def test_choices_have_their_own_seeds_and_the_first_keeps_the_requests(self):
        sampling = SamplingParams(seed=-7, n=4)
        choices = [sampling.for_choice(i) for i in range(4)]
        assert choices[0].seed == -7
        assert len({choice.seed for choice in choices}) == 4
        assert all(choice.n == 1 for choice in choices)
        assert choices[2] == sampling.for_choice(2)
        assert SamplingParams(n=3).for_choice(2).seed is None


class TestNoise:
    @staticmethod
    def reference_noise(seed: int, position: int, token_id: int) -> np.float32:
        """The docstring of TorchSamplingKernels, once more, on numpy's own unsigned integers."""

        def mix(z: np.uint64) -> np.uint64:
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return z ^ (z >> np.uint64(31))

        with np.errstate(over="ignore"):
            golden = np.uint64(0x9E3779B97F4A7C15)
            row = mix(mix(np.uint64(seed % (1 << 64))) + np.uint64(position + 1) * golden)
            bits = int(mix(row + np.uint64(token_id + 1) * golden) >> np.uint64(40))
        return np.float32(-math.log(-math.log((bits + 0.5) * 2.0**-24)))

    @given(
        seed=st.integers(-(1 << 63), (1 << 63) - 1),
        position=st.integers(0, 1 << 20),
        scale=st.sampled_from([0.01, 1.0, 5.0, 50.0]),
    )
    @settings(max_examples=60, deadline=None)
    def test_gumbel_argmax_is_the_documented_arithmetic(self, seed, position, scale):
        logits = random_logits(2, 37, seed % 1000, scale)
        logits[:, 5] = -math.inf
        positions = [position, position + 1]
        noise = np.array([[self.reference_noise(seed, p, t) for t in range(37)] for p in positions])
        expected = (logits.numpy() + noise).argmax(axis=1).tolist()
        assert KERNELS.gumbel_argmax(logits, seed, positions) == expected

    def test_marginal_is_softmax(self):
        logits = random_logits(1, 12, 3, 1.2)
        expected = torch.softmax(logits.double(), dim=1)[0].numpy()
        draws = 20_000
        counts = np.zeros(12)
        for seed in range(40):
            chosen = KERNELS.gumbel_argmax(logits.expand(draws // 40, 12), seed, list(range(draws // 40)))
            counts += np.bincount(chosen, minlength=12)
        assert stats.chisquare(counts, expected * draws).pvalue > 1e-3

    def test_successive_positions_are_independent(self):
        logits = torch.zeros(1, 4)
        draws = [KERNELS.gumbel_argmax(logits.expand(2, 4), seed, [0, 1]) for seed in range(4000)]
        table = np.zeros((4, 4))
        for first, second in draws:
            table[first, second] += 1
        assert stats.chisquare(table.ravel()).pvalue > 1e-3

    def test_a_row_does_not_depend_on_its_neighbours(self):
        logits = random_logits(16, 5000, 1)
        together = KERNELS.gumbel_argmax(logits, 11, list(range(16)))
        alone = [KERNELS.gumbel_argmax(logits[i : i + 1], 11, [i])[0] for i in range(16)]
        assert together == alone
        assert KERNELS.logprobs(logits, together) == [
            KERNELS.logprobs(logits[i : i + 1], [together[i]])[0] for i in range(16)
        ]

    def test_minus_infinity_never_wins_and_nan_does_not_crash(self):
        logits = torch.full((2, 6), -math.inf)
        logits[0, 4] = -1e30
        logits[1] = math.nan
        assert KERNELS.gumbel_argmax(logits, 0, [0, 1])[0] == 4

    def test_argmax_takes_the_lowest_id_among_equals(self):
        logits = torch.zeros(3, 5000)
        logits[0, [4000, 17, 4999]] = 1.0
        assert KERNELS.argmax(logits) == [17, 0, 0]

    def test_logprobs(self):
        logits = random_logits(3, 50)
        expected = torch.log_softmax(logits.double(), dim=1)[[0, 1, 2], [1, 49, 0]].tolist()
        assert KERNELS.logprobs(logits, [1, 49, 0]) == pytest.approx(expected)


class TestSampleIndex:
    @given(st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0, 7.0]), min_size=1, max_size=20), st.floats(0, 1))
    @settings(deadline=None)
    def test_only_indices_of_positive_weight(self, weights, uniform):
        if sum(weights) == 0:
            weights[-1] = 1.0
        uniform = min(uniform, math.nextafter(1.0, 0.0))
        assert weights[sample_index(torch.tensor(weights), uniform)] > 0

    def test_distribution(self):
        weights = torch.tensor([0.0, 3.0, 1.0, 0.0, 4.0, 0.0])
        drawn = [sample_index(weights, (i + 0.5) / 800) for i in range(800)]
        assert np.bincount(drawn, minlength=6).tolist() == [0, 300, 100, 0, 400, 0]


def reference_shape(logits, sequence, draft, eos):
    """Row by row, token by token, in float64: every parameter as its API describes it."""
    s = sequence.sampling
    result = logits.double().clone()
    for i in range(len(result)):
        row = result[i]
        prefix = list(draft[: len(draft) + 1 - len(result) + i])
        output = sequence.output_token_ids + prefix
        for t in set(sequence.token_ids + prefix):
            if t < len(row):
                row[t] = row[t] / s.repetition_penalty if row[t] > 0 else row[t] * s.repetition_penalty
        for t in set(output):
            if t < len(row):
                row[t] -= s.frequency_penalty * output.count(t) + s.presence_penalty
        for t, bias in s.logit_bias.items():
            if t < len(row):
                row[t] += bias
        if len(output) < s.min_tokens:
            for t in [*s.stop_token_ids, *([] if s.ignore_eos else eos)]:
                if t < len(row):
                    row[t] = -math.inf
        if s.temperature == 0:
            continue
        row /= s.temperature
        if s.top_k > 0:
            kth = sorted(row.tolist(), reverse=True)[min(s.top_k, len(row)) - 1]
            row[row < kth] = -math.inf
        p = torch.softmax(row, 0)
        total, kept = 0.0, set()
        for t in sorted(range(len(row)), key=lambda t: -p[t]):
            if s.top_p < 1.0 and total >= s.top_p - 1e-12:
                break
            kept.add(t)
            total += float(p[t])
        row[[t for t in range(len(row)) if t not in kept]] = -math.inf
        row[p < s.min_p * p.max()] = -math.inf
    return result


FULL = {"temperature": 0.7, "top_p": 0.83, "top_k": 9, "min_p": 0.02, "presence_penalty": 0.5,
        "frequency_penalty": 0.3, "repetition_penalty": 1.3, "logit_bias": {3: 2.0, 8: -100.0, 400: 5.0},
        "min_tokens": 4, "stop_token_ids": (6, 900)}  # fmt: skip


class TestShape:
    @pytest.mark.parametrize("changes", [
        {"temperature": 0.3}, {"temperature": 1.7}, {"top_p": 0.5}, {"top_p": 0.01}, {"top_p": 0.999}, {"top_k": 1},
        {"top_k": 5}, {"top_k": 10_000}, {"min_p": 0.1}, {"min_p": 1.0}, {"presence_penalty": 1.5},
        {"frequency_penalty": -0.7}, {"repetition_penalty": 1.5}, {"repetition_penalty": 0.5},
        {"logit_bias": {4: 3.5, 7: -4}}, {"min_tokens": 3},
        {"min_tokens": 5, "ignore_eos": True, "stop_token_ids": (9,)},
        FULL, {**FULL, "temperature": 0.0}, {**FULL, "top_k": -1}, {**FULL, "seed": 5, "top_p": 1.0},
    ], ids=str)  # fmt: skip
    @pytest.mark.parametrize("vocab", [40, 300])
    def test_against_the_plain_reference(self, changes, vocab):
        draft = [4, 4, 11, 7]
        logits = random_logits(5, vocab, 5)
        before = logits.clone()
        sequence = make_sequence(SamplingParams(**changes), prompt=(3, 7, 7, 39), output=(11, 4))
        shaped = shape_logits(logits, sequence, draft, (0, 2, 5000))
        expected = reference_shape(logits, sequence, draft, (0, 2, 5000))
        assert torch.equal(logits, before)
        if changes.get("temperature", 1.0) == 0.0:
            torch.testing.assert_close(shaped.double(), expected, rtol=1e-5, atol=1e-4)
        else:  # defined up to a constant
            assert torch.equal(shaped == -math.inf, expected == -math.inf)
            found, wanted = torch.softmax(shaped.double(), 1), torch.softmax(expected, 1)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)

    @pytest.mark.parametrize(
        ("changes", "processor"),
        [
            ({"temperature": 0.6}, TemperatureLogitsWarper(0.6)),
            ({"top_k": 7}, TopKLogitsWarper(7)),
            ({"top_p": 0.9}, TopPLogitsWarper(0.9)),
            ({"min_p": 0.05}, MinPLogitsWarper(0.05)),
            ({"repetition_penalty": 1.2}, RepetitionPenaltyLogitsProcessor(1.2)),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_against_transformers(self, changes, processor):
        sequence = make_sequence(SamplingParams(**changes), prompt=(3, 7, 7), output=(11, 4))
        draft = [250, 4]
        logits = random_logits(3, 500, 8)
        shaped = shape_logits(logits, sequence, draft, ())
        for i in range(3):
            known = torch.tensor([sequence.token_ids + draft[:i]])
            expected = processor(known, logits[i : i + 1].clone())
            torch.testing.assert_close(torch.softmax(shaped[i : i + 1], 1), torch.softmax(expected, 1))

    def test_nothing_to_do_returns_the_same_object(self):
        logits = random_logits(2, 20)
        for sampling in [
            SamplingParams(),
            SamplingParams(seed=3),
            SamplingParams(temperature=0.0, top_p=0.3, top_k=2, min_p=0.4),
            SamplingParams(min_tokens=2, stop_token_ids=(5,)),
            SamplingParams(logit_bias={20: 5.0}),
        ]:
            sequence = make_sequence(sampling, output=(4, 5))
            assert shape_logits(logits, sequence, [1], (0,)) is logits

    def test_last_row_follows_the_whole_draft(self):
        sequence = make_sequence(SamplingParams(**FULL), output=(8,))
        draft = [4, 9, 9]
        logits = random_logits(4, 60)
        every = shape_logits(logits, sequence, draft, (0,))
        last = shape_logits(logits[3:], sequence, draft, (0,))
        assert torch.equal(every[3:], last)

    @pytest.mark.parametrize(
        "changes", [{"temperature": 0.9, "top_p": 0.95}, {"top_k": 50, "min_p": 0.01}, FULL], ids=str
    )
    def test_a_row_does_not_depend_on_its_neighbours(self, changes):
        sequence = make_sequence(SamplingParams(**changes), output=(8,))
        draft = list(range(10, 25))
        logits = random_logits(16, 3000)
        every = shape_logits(logits, sequence, draft, (0,))
        for i in range(16):
            assert torch.equal(every[i : i + 1], shape_logits(logits[i : i + 1], sequence, draft[:i], (0,)))

    @given(
        row=st.lists(st.sampled_from([-math.inf, -1e30, -3.0, 0.0, 0.5, 0.5, 2.0, 80.0]), min_size=2, max_size=30),
        temperature=st.sampled_from([1e-5, 0.3, 1.0, 100.0]),
        top_p=st.sampled_from([1e-9, 0.2, 0.9, 1 - 1e-12, 1.0]),
        top_k=st.sampled_from([0, 1, 3, 1 << 40]),
        min_p=st.sampled_from([0.0, 1e-30, 0.5, 1.0]),
    )
    @settings(deadline=None)
    def test_the_likeliest_token_always_survives_and_ties_stay_together(self, row, temperature, top_p, top_k, min_p):
        if max(row) == -math.inf:
            row[0] = 0.0
        logits = torch.tensor([row])
        sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
        probabilities = torch.softmax(shape_logits(logits, make_sequence(sampling), [], ()), 1)[0]
        assert float(probabilities.sum()) == pytest.approx(1.0)
        by_logit: dict[float, set[float]] = {}
        for logit, p in zip(row, probabilities.tolist(), strict=True):
            by_logit.setdefault(logit, set()).add(p)
        assert all(len(values) == 1 for values in by_logit.values())
        ordered = [min(by_logit[logit]) for logit in sorted(by_logit)]
        assert ordered == sorted(ordered)
        assert ordered[-1] > 0


few_tokens = st.lists(st.integers(0, 3), max_size=6)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4), few_tokens, few_tokens, st.data())
@settings(deadline=None)
def test_bad_words_never_become_part_of_the_output(words, output, draft, data):
    """For every row of a draft: the tokens at -inf are those that would complete a word within the output."""
    words = tuple(map(tuple, words))
    sequence = make_sequence(SamplingParams(bad_words=words), prompt=[0, 1, 2, 3] * 2, output=output)
    num_rows = data.draw(st.integers(1, len(draft) + 1))
    shaped = shape_logits(torch.zeros(num_rows, 4), sequence, draft, [])
    for row in range(num_rows):
        text = [*output, *draft[: len(draft) + 1 - num_rows + row]]
        for token_id in range(4):
            after = [*text, token_id]
            forbidden = any(tuple(after[-len(word) :]) == word and len(word) <= len(after) for word in words)
            assert (float(shaped[row, token_id]) == -math.inf) == forbidden


def test_only_allowed_tokens_are_left():
    logits = random_logits(2, 6)
    shaped = shape_logits(logits, make_sequence(SamplingParams(allowed_token_ids=(1, 4, 99), temperature=0)), [2], [])
    assert torch.equal(shaped[:, [1, 4]], logits[:, [1, 4]])
    assert bool((shaped[:, [0, 2, 3, 5]] == -math.inf).all())
