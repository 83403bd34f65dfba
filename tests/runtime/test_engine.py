"""The engine on the fake backend, whose logits come from what its KV slots hold: books and bits are checked at once."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_engine import EOS, TOKENIZER, VOCAB_SIZE, ScriptedDrafter, make_engine
from paceline.runtime.backend_fake import FakeBackend
from paceline.runtime.drafting.model import ModelDrafter
from paceline.runtime.drafting.suffix import SuffixDrafter
from paceline.runtime.kv_cache import KVCache
from paceline.runtime.logprobs import token_logprobs
from paceline.runtime.output import joined
from paceline.runtime.sampling import SamplingParams, TorchSamplingKernels, shape_logits
from paceline.runtime.sequence import FinishReason, Request, Sequence, SpeculationParams

PROMPT = tuple(b"def quick_sort(values):")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors here are tiny: threads would only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def backend(**options):
    return FakeBackend(VOCAB_SIZE, **{"num_blocks": 300} | options)


def request(request_id="r", prompt=PROMPT, speculation=None, **sampling):
    sampling = {"temperature": 0.0, "max_tokens": 24} | sampling
    return Request(request_id, tuple(prompt), SamplingParams(**sampling), speculation or SpeculationParams())


def mixed_requests():
    """Eight requests that differ in everything."""
    return [
        request("greedy"),
        request("seeded", seed=5, temperature=0.7, max_tokens=30),
        request("hot", b"z", seed=-3, temperature=1.5, max_tokens=17),
        request("penal", b"abcabc", repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.1),
        request("nucleus", PROMPT[:9], seed=2**40, temperature=1.0, top_p=0.8, top_k=30, min_p=0.01, max_tokens=40),
        request("biased", (*PROMPT, *b"xyz"), logit_bias={65: 3.0, 66: -100.0}, min_tokens=6),
        request("logprobs", PROMPT[:5], seed=1, temperature=0.9, logprobs=3, max_tokens=21),
        request("choices", PROMPT[:14], seed=9, temperature=0.8, n=3, max_tokens=19),
    ]


def seen(output):
    """Everything a client sees, timing and origins aside."""
    return output.request_id, output.index, output.token_ids, output.text, output.logprobs, output.finish_reason


def run(requests, fake=None, **options):
    """Run to the end, checking the books after every step: whole outputs by (request id, index), and the engine."""
    engine = make_engine(fake or backend(), **options)
    for each in requests:
        engine.submit(each)
    parts = {}
    while engine.has_unfinished:
        for output in engine.step():
            parts.setdefault((output.request_id, output.index), []).append(output)
        engine.check()
        assert all(s.num_computed_tokens == len(s.block_table) == 0 for s in engine._scheduler.waiting)
    assert engine._kv_cache.num_available_blocks == engine._kv_cache.num_blocks
    return {key: joined(outputs) for key, outputs in parts.items()}, engine


def seen_all(requests, fake=None, **options):
    outputs, _ = run(requests, fake, **options)
    return {key: seen(output) for key, output in outputs.items()}


def truth_of(requests, **fake_options):
    """sequence id -> output of plain decoding."""
    outputs, _ = run(requests, backend(**fake_options))
    return {f"{request_id}/{index}": output.token_ids for (request_id, index), output in outputs.items()}


@functools.cache
def plain_mixed():
    """What `mixed_requests` give in plain decoding, and their tokens as a drafter's truth."""
    requests = mixed_requests()
    return seen_all(requests), truth_of(requests)


# --- what is generated ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 11}])
def test_tokens_are_those_of_one_forward_pass_per_token_without_any_engine(sampling):
    asked = request(**sampling)
    sequence = Sequence(asked)
    while sequence.num_output_tokens < 24 and EOS not in sequence.output_token_ids:
        logits = torch.from_numpy(backend()._logits(sequence.token_ids).astype(np.float32))[None]
        shaped = shape_logits(logits, sequence, [], [EOS])
        kernels, position = TorchSamplingKernels(), sequence.num_output_tokens
        greedy = sequence.sampling.mode == "greedy"
        sequence.token_ids += kernels.argmax(shaped) if greedy else kernels.gumbel_argmax(shaped, 11, [position])
    outputs, _ = run([asked])
    assert outputs["r", 0].token_ids == sequence.output_token_ids


@pytest.mark.parametrize("num_draft_tokens", range(1, 16))
@pytest.mark.parametrize("error_rate", [0.0, 0.3, 1.0])
def test_drafts_of_any_quality_change_nothing_that_a_client_sees(error_rate, num_draft_tokens):
    expected, truth = plain_mixed()
    drafter = ScriptedDrafter(truth, error_rate, seed=num_draft_tokens)
    assert seen_all(mixed_requests(), drafter=drafter, num_draft_tokens=num_draft_tokens) == expected
    accepted = {num_accepted / num_drafted for _, _, num_drafted, num_accepted in drafter.observed}
    assert accepted == {1.0} if error_rate == 0.0 else min(accepted) < 1.0


@pytest.mark.parametrize("num_draft_tokens", [1, 4, 15])
def test_suffix_drafts_change_nothing_and_are_accepted_on_repetitive_text(num_draft_tokens):
    requests = [request(str(i), PROMPT[: 8 + i], max_tokens=60, ignore_eos=True) for i in range(4)]
    options = {"context": 1}  # the greedy output goes round in circles
    outputs, engine = run(
        requests, backend(**options), drafter=SuffixDrafter(1000, 2), num_draft_tokens=num_draft_tokens
    )
    assert {key: seen(output) for key, output in outputs.items()} == seen_all(requests, backend(**options))
    assert engine.metrics.spec_decode_num_accepted_tokens > 60
    assert "suffix" in outputs["0", 0].origins


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "seed": 3}, {"temperature": 1.0, "seed": 4}])
def test_the_same_model_as_its_own_draft_is_always_accepted(sampling):
    requests = [request(str(i), PROMPT[: 5 + 4 * i], max_tokens=30, ignore_eos=True, **sampling) for i in range(3)]
    fake = backend()
    cache = KVCache(fake.num_blocks, fake.block_size, fake.copy_block)
    drafter = ModelDrafter(fake, TorchSamplingKernels(), cache, 120, VOCAB_SIZE, np.random.default_rng(1), [EOS])
    outputs, engine = run(requests, drafter=drafter, num_draft_tokens=4)
    assert {key: seen(output) for key, output in outputs.items()} == seen_all(requests)
    assert engine.metrics.spec_decode_num_accepted_tokens == engine.metrics.spec_decode_num_draft_tokens > 0
    assert outputs["0", 0].stats.num_rounds == 1 + 6  # the first token, 5 full rounds, and a last one cut to 4 tokens
    cache.check([])


def test_a_request_alone_gives_what_it_gives_in_a_batch():
    together, _ = plain_mixed()
    for each in mixed_requests():
        alone = seen_all([each])
        assert alone == {key: output for key, output in together.items() if key[0] == each.request_id}


@pytest.mark.parametrize("row_budget", [8, 9, 23, 64])
@pytest.mark.parametrize("chunked", [True, False])
def test_chunks_of_a_prompt_change_nothing(chunked, row_budget):
    requests = [each for each in mixed_requests() if chunked or len(each.prompt_token_ids) <= row_budget]
    assert len(requests) >= 3
    fake = backend()
    outputs = seen_all(requests, fake, max_num_tokens=row_budget, enable_chunked_prefill=chunked)
    assert outputs == seen_all(requests)
    assert max(fake.num_rows_per_call) <= row_budget


def test_prefix_hits_change_nothing():
    requests = [request(f"{i}", (*PROMPT, 65 + i % 3), seed=i, temperature=0.9, logprobs=1) for i in range(6)]
    options = {"max_batch_size": 2}
    with_hits, engine = run(requests, **options)
    without, engine_without = run(requests, enable_prefix_cache=False, **options)
    assert {k: seen(o) for k, o in with_hits.items()} == {k: seen(o) for k, o in without.items()}
    assert with_hits["5", 0].stats.num_cached_tokens == 20
    assert (engine.metrics.prefix_cache_hits, engine_without.metrics.prefix_cache_hits) == (80, 0)


def test_requests_that_arrive_while_others_run_change_nothing():
    expected, truth = plain_mixed()
    drafter = ScriptedDrafter(truth, 0.4)
    engine, parts = make_engine(backend(), drafter=drafter), {}
    arriving = mixed_requests()
    while engine.has_unfinished or arriving:
        if arriving:
            engine.submit(arriving.pop())
        for _ in range(3):
            for output in engine.step():
                parts.setdefault((output.request_id, output.index), []).append(output)
    assert {key: seen(joined(outputs)) for key, outputs in parts.items()} == expected


def test_preemption_changes_nothing():
    sampling = {"temperature": 0.8, "max_tokens": 40, "ignore_eos": True}
    requests = [request(str(i), PROMPT[: 10 + i], seed=i, **sampling) for i in range(6)]
    truth = truth_of(requests)
    for error_rate in (0.0, 0.5):
        drafter = ScriptedDrafter(truth, error_rate)
        options = {"scheduler_policy": "max_utilization", "enable_prefix_cache": error_rate > 0, "drafter": drafter}
        outputs, engine = run(requests, backend(num_blocks=22), **options)
        assert {f"{r}/{i}": output.token_ids for (r, i), output in outputs.items()} == truth
        assert engine.metrics.num_preemptions > 0
        assert len(drafter.released) == engine.metrics.num_preemptions + len(requests)


def test_reserving_blocks_means_no_preemption():
    requests = [request(str(i), PROMPT[: 10 + i], max_tokens=40, ignore_eos=True) for i in range(6)]
    outputs, engine = run(requests, backend(num_blocks=22), drafter=ScriptedDrafter(error_rate=1.0))
    assert {key: seen(output) for key, output in outputs.items()} == seen_all(requests)
    assert engine.metrics.num_preemptions == 0


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
    st.integers(1, 5),
    st.integers(30, 60),
    st.integers(2, 40),
    st.integers(1, 6),
    st.booleans(),
    st.floats(0, 1),
    st.integers(0, 15),
    st.lists(
        st.tuples(st.integers(1, 23), st.integers(1, 30), st.integers(1, 3), st.booleans()), min_size=1, max_size=7
    ),
)
def test_any_engine_gives_what_a_plain_one_gives(
    policy, block_size, num_blocks, row_budget, batch, prefix_cache, error_rate, num_draft_tokens, shapes
):
    requests = [
        request(str(i), PROMPT[:length], n=n, max_tokens=length_out, temperature=0.8 * sampled, seed=i)
        for i, (length, length_out, n, sampled) in enumerate(shapes)
    ]
    drafter = ScriptedDrafter(truth_of(requests), error_rate, obeys_limits=error_rate < 0.5)
    outputs = seen_all(
        requests,
        backend(num_blocks=max(num_blocks, -(-53 // block_size)), block_size=block_size),
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        max_num_tokens=row_budget,
        max_batch_size=batch,
        scheduler_policy=policy,
        enable_prefix_cache=prefix_cache,
    )
    assert outputs == seen_all(requests)


def test_unseeded_sampling_runs_with_drafts_and_differs_between_requests():
    requests = [request(str(i), temperature=1.0, ignore_eos=True) for i in range(3)]
    outputs, _ = run(requests, drafter=SuffixDrafter(100, 1))
    assert [len(output.token_ids) for output in outputs.values()] == [24, 24, 24]
    assert len({tuple(output.token_ids) for output in outputs.values()}) == 3


# --- where it ends -------------------------------------------------------------------------------------------------


def scripted(text: bytes | list[int], prompt=PROMPT):
    """A backend that answers `prompt` with these tokens, and a drafter that knows."""
    fake = backend(script={tuple(prompt): list(text)})
    return fake, ScriptedDrafter({"r/0": [*text, *([7] * 20)]}, obeys_limits=False)


def end(text, num_draft_tokens=None, **sampling):
    """The output for a scripted continuation, plain (None) or speculated by an oracle."""
    fake, drafter = scripted(text)
    drafter = drafter if num_draft_tokens else None
    outputs, _ = run([request(**sampling)], fake, drafter=drafter, num_draft_tokens=num_draft_tokens or 0)
    return outputs["r", 0]


ROUNDS = [None, 1, 2, 3, 5, 15]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("position", range(10))
def test_an_end_token_ends_at_each_position_of_an_accepted_run(position, rounds):
    text = [*b"0123456789"[:position], EOS, *b"never seen"]
    output = end(text, rounds)
    assert (output.token_ids, output.text) == (text[: position + 1], "0123456789"[:position])
    assert output.finish_reason is FinishReason.STOP
    assert len(output.origins) == position + 1


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab!")])
def test_a_stop_token_has_text_only_if_asked_for(include, text, rounds):
    output = end(b"ab!cdef", rounds, stop_token_ids=(ord("!"),), include_stop_str_in_output=include)
    assert (output.token_ids, output.text, output.finish_reason) == (list(b"ab!"), text, FinishReason.STOP)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_text_held_back_for_a_stop_string_comes_before_that_of_a_stop_token(rounds):
    options = {"stop": ("bx",), "stop_token_ids": (ord("!"),)}
    assert end(b"ab!cd", rounds, include_stop_str_in_output=True, **options).text == "ab!"
    assert end(b"ab!cd", rounds, **options).text == "ab"


@pytest.mark.parametrize("rounds", ROUNDS)
def test_end_of_sequence_can_be_ignored_and_never_has_text(rounds):
    output = end([*b"ab", EOS, *b"cd!"], rounds, ignore_eos=True, stop_token_ids=(ord("!"),))
    assert (output.token_ids, output.text) == ([*b"ab", EOS, *b"cd!"], "abcd")
    assert end([EOS], rounds, include_stop_str_in_output=True).text == ""


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_ends_inside_an_accepted_run(max_tokens, rounds):
    output = end(b"abcdefghijklmnop", rounds, max_tokens=max_tokens, logprobs=0)
    assert output.text == "abcdefghijklmnop"[:max_tokens]
    assert (len(output.token_ids), len(output.logprobs)) == (max_tokens, max_tokens)
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize(
    ("stop", "include", "text", "num_tokens"),
    [
        (("efg",), False, "abcd", 7),
        (("efg",), True, "abcdefg", 7),
        (("efx", "g"), False, "abcdef", 7),
        (("h", "def"), False, "abc", 6),
        (("a",), False, "", 1),
        (("xyz",), False, "abcdefghij", 10),
    ],
)
def test_stop_strings_span_tokens_and_cut_the_text_but_not_the_tokens(stop, include, text, num_tokens, rounds):
    options = {"stop": stop, "include_stop_str_in_output": include, "max_tokens": 10, "logprobs": 1}
    output = end(b"abcdefghijklm", rounds, **options)
    assert (output.text, len(output.token_ids), len(output.logprobs)) == (text, num_tokens, num_tokens)
    assert output.finish_reason is (FinishReason.LENGTH if "xyz" in stop else FinishReason.STOP)


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_is_known():
    fake, _ = scripted(b"abcabx")
    engine = make_engine(fake)
    engine.submit(request(stop=("abx", "cabz"), max_tokens=6))
    texts = [engine.step()[0].text for _ in range(6)]
    assert (texts, engine.has_unfinished) == (["", "", "ab", "", "", "c"], False)


@pytest.mark.parametrize("rounds", ROUNDS)
def test_stop_wins_over_length_on_the_same_token(rounds):
    for sampling in ({"stop": ("cd",)}, {"stop_token_ids": (ord("d"),)}):
        assert end(b"abcdef", rounds, max_tokens=4, **sampling).finish_reason is FinishReason.STOP


@pytest.mark.parametrize("rounds", ROUNDS)
def test_min_tokens_holds_back_every_kind_of_end(rounds):
    at_end = end([*b"ab", EOS, *b"cd"], rounds, min_tokens=5, stop_token_ids=(ord("d"),))
    assert len(at_end.token_ids) >= 5 and EOS not in at_end.token_ids[:5] and ord("d") not in at_end.token_ids[:5]
    assert end(b"xxaxxaxxa", rounds, min_tokens=4, stop=("a",)).text == "xxaxx"


@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_sequence_ends_at_max_seq_len(rounds):
    fake, drafter = scripted(b"abcdefghijklmnop")
    limits = {"max_seq_len": len(PROMPT) + 9, "drafter": drafter if rounds else None, "num_draft_tokens": rounds or 0}
    for max_tokens in (None, 24):
        outputs, _ = run([request(max_tokens=max_tokens)], fake, **limits)
        assert outputs["r", 0].text == "abcdefghi"
        assert outputs["r", 0].finish_reason is FinishReason.LENGTH


def test_the_default_of_max_tokens_is_the_engine_s():
    outputs, _ = run([request(max_tokens=None, ignore_eos=True)], request_default_max_tokens=7)
    assert len(outputs["r", 0].token_ids) == 7
    outputs, _ = run([request(max_tokens=None, min_tokens=9, ignore_eos=True)], request_default_max_tokens=7)
    assert len(outputs["r", 0].token_ids) == 9


@pytest.mark.parametrize("rounds", ROUNDS)
def test_characters_are_never_split(rounds):
    text = "naïve 😀 日本"
    fake, drafter = scripted(text.encode())
    engine = make_engine(fake, drafter=drafter if rounds else None, num_draft_tokens=rounds or 0)
    engine.submit(request(max_tokens=len(text.encode())))
    deltas = []
    while engine.has_unfinished:
        deltas += [output.text for output in engine.step()]
    assert "".join(deltas) == text
    cut = end("ab😀".encode(), rounds, max_tokens=4)
    assert cut.text == "ab\ufffd" == TOKENIZER.decode(cut.token_ids)


# --- logprobs ------------------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_target_distribution():
    outputs, _ = run([request(logprobs=2, temperature=0.3, seed=1, logit_bias={1: 50.0}, max_tokens=5)])
    entries = outputs["r", 0].logprobs
    known = list(PROMPT)
    for entry, token_id in zip(entries, outputs["r", 0].token_ids, strict=True):
        logits = torch.from_numpy(backend()._logits(known).astype(np.float32))
        expected = torch.log_softmax(logits, dim=0)
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(expected[token_id]), abs=1e-5)
        assert [t for t, _ in entry.top] == expected.topk(2).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected.topk(2).values.tolist(), abs=1e-5)
        known.append(token_id)


def test_logprobs_come_only_when_asked_for_and_may_have_no_alternatives():
    outputs, _ = run([request("none"), request("zero", logprobs=0)])
    assert outputs["none", 0].logprobs is None
    assert {len(entry.top) for entry in outputs["zero", 0].logprobs} == {0}


# --- several choices -----------------------------------------------------------------------------------------------


def test_each_choice_is_what_its_own_request_would_give():
    asked = request(n=4, seed=3, temperature=0.9)
    outputs, _ = run([asked])
    for index in range(4):
        alone = Request("alone", PROMPT, asked.sampling.for_choice(index))
        assert run([alone])[0]["alone", 0].token_ids == outputs["r", index].token_ids
    assert len({tuple(output.token_ids) for output in outputs.values()}) == 4


@pytest.mark.parametrize("length", [8, 9, 11])
def test_choices_share_the_prompt_s_blocks(length):
    fake = backend(block_size=4)
    engine = make_engine(fake, enable_prefix_cache=False)
    engine.submit(request(prompt=PROMPT[:length], n=3, temperature=1.0, seed=1, max_tokens=5, ignore_eos=True))
    assert (engine.num_running, engine.num_waiting) == (0, 3)
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (3, 0)
    tables = [sequence.block_table for sequence in engine._scheduler.running]
    num_shared = (length - 1) // 4  # the block of the last prompt token is each choice's own
    assert tables[0][:num_shared] == tables[1][:num_shared] == tables[2][:num_shared]
    assert len({table[num_shared] for table in tables}) == 3
    while engine.has_unfinished:
        engine.step()
        engine.check()
    assert fake.num_rows_per_call[:2] == [length, 3]  # the prompt once; then each choice's next row
    engine.check()


def test_more_choices_than_run_at_once_are_queued():
    asked = request(n=7, seed=3, temperature=0.9)
    few, engine = run([asked], max_batch_size=2)
    assert {k: seen(o) for k, o in few.items()} == seen_all([asked])
    assert engine.metrics.request_success.total() == 7


def test_choices_survive_a_first_one_that_ends_with_its_first_token():
    fake = backend(script={PROMPT: [EOS]})
    asked = request(n=3, seed=3, temperature=1.0)
    outputs, _ = run([asked], fake)
    assert [output.token_ids for output in outputs.values()] == [[EOS]] * 3


# --- drafts --------------------------------------------------------------------------------------------------------


def test_nothing_is_drafted_before_a_sequence_s_first_token():
    requests = [request(str(i), PROMPT[: 1 + 5 * i], n=1 + i % 2) for i in range(5)]
    drafter = ScriptedDrafter()
    run(requests, drafter=drafter, max_num_tokens=16)
    assert min(num_known for _, num_known, _ in drafter.proposed) == 1


def test_nothing_is_drafted_past_what_a_sequence_can_still_use():
    """The last token comes from the target in any case, so one less than what is left."""
    drafter = ScriptedDrafter(error_rate=1.0)
    run([request(max_tokens=9, ignore_eos=True)], drafter=drafter, num_draft_tokens=6)
    assert {limit for _, num_known, limit in drafter.proposed if num_known == 1} == {6}
    assert all(limit == min(6, 9 - num_known - 1) > 0 for _, num_known, limit in drafter.proposed)


def test_rejected_drafts_give_their_blocks_back_at_once():
    engine = make_engine(backend(block_size=2), drafter=ScriptedDrafter(error_rate=1.0), num_draft_tokens=9)
    engine.submit(request(max_tokens=30, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
        for sequence in engine._scheduler.running:
            assert len(sequence.block_table) == -(-sequence.num_computed_tokens // 2)


def test_a_drafter_observes_its_drafts_after_the_tokens_are_known_and_is_told_of_the_end():
    truth = truth_of([request(max_tokens=12, ignore_eos=True)])
    drafter = ScriptedDrafter(truth)
    run([request(max_tokens=12, ignore_eos=True)], drafter=drafter, num_draft_tokens=4)
    known = len(PROMPT)
    assert drafter.observed == [("r/0", known + 6, 4, 4), ("r/0", known + 11, 4, 4)]
    assert drafter.released == ["r/0"]


def test_usage_counts_rounds_drafted_and_accepted_tokens_by_position():
    truth = truth_of([request(max_tokens=13, ignore_eos=True)])
    outputs, engine = run(
        [request(max_tokens=13, ignore_eos=True)], drafter=ScriptedDrafter(truth), num_draft_tokens=4
    )
    output = outputs["r", 0]
    assert output.origins == ["target"] + ["draft"] * 4 + ["target"] + ["draft"] * 4 + ["target"] + ["draft", "target"]
    stats = output.stats
    assert (stats.num_rounds, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 9, 9)
    assert (stats.drafted_per_position, stats.accepted_per_position) == ([3, 2, 2, 2], [3, 2, 2, 2])
    assert stats.arrived_at <= stats.first_scheduled_at <= stats.first_token_at <= stats.finished_at
    assert engine.metrics.generation_tokens == 13


def test_accepted_tokens_after_the_end_do_not_count():
    fake, _ = scripted([*b"ab", EOS, *b"cdef"])
    drafter = ScriptedDrafter({"r/0": [*b"ab", EOS, *b"cdef"]})
    outputs, engine = run([request()], fake, drafter=drafter, num_draft_tokens=5)
    stats = outputs["r", 0].stats
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.accepted_per_position) == (5, 2, [1, 1, 0, 0, 0])
    assert engine.metrics.spec_decode_num_accepted_tokens == 2


def test_a_request_chooses_whether_how_far_and_by_whom_it_is_drafted_for():
    asked = [
        request("off", speculation=SpeculationParams(enabled=False), ignore_eos=True),
        request("short", speculation=SpeculationParams(num_draft_tokens=1), ignore_eos=True),
        request("named", speculation=SpeculationParams(method="test"), ignore_eos=True),
        request("zero", speculation=SpeculationParams(num_draft_tokens=0), ignore_eos=True),
    ]
    outputs, _ = run(asked, drafter=ScriptedDrafter(error_rate=1.0), num_draft_tokens=3)
    lengths = {request_id: len(output.stats.drafted_per_position) for (request_id, _), output in outputs.items()}
    assert lengths == {"off": 0, "short": 1, "named": 3, "zero": 0}


def test_drafts_leave_rows_to_prompts():
    engine = make_engine(backend(), drafter=ScriptedDrafter(), num_draft_tokens=15, max_num_tokens=8)
    engine.submit(request("first", b"a", max_tokens=100, ignore_eos=True))
    engine.step()
    engine.submit(request("second", max_tokens=4))
    for _ in range(1 + len(PROMPT) // 3):
        started = any(output.request_id == "second" for output in engine.step())
    assert started


# --- cancelling, failing, refusing ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_requests_can_be_cancelled_at_any_step_and_leave_no_blocks(data):
    policy = data.draw(st.sampled_from(["guaranteed_no_evict", "max_utilization"]))
    drafter = ScriptedDrafter(error_rate=0.5)
    engine = make_engine(
        backend(num_blocks=25), drafter=drafter, scheduler_policy=policy, max_num_tokens=12, max_batch_size=4
    )
    submitted, ended, last = 0, set(), {}
    actions = st.sampled_from(["submit", "step", "step", "step", "cancel"])
    for action in data.draw(st.lists(actions, max_size=40)):
        outputs = []
        if action == "submit":
            length, n = data.draw(st.integers(1, 23)), data.draw(st.integers(1, 3))
            engine.submit(request(str(submitted), PROMPT[:length], n=n, max_tokens=data.draw(st.integers(1, 20))))
            submitted += 1
        elif action == "step":
            outputs = engine.step()
        elif submitted:
            victim = str(data.draw(st.integers(0, submitted - 1)))
            outputs = engine.cancel(victim)
            assert all(output.finish_reason is FinishReason.CANCELLED for output in outputs)
            assert engine.cancel(victim) == []
        for output in outputs:
            key = output.request_id, output.index
            assert key not in ended
            if output.finish_reason:
                ended.add(key)
            last[key] = output
        engine.check()
    for request_id in range(submitted):
        engine.cancel(str(request_id))
    assert not engine.has_unfinished and engine.num_running == engine.num_waiting == 0
    assert engine._kv_cache.num_available_blocks == 25
    assert engine.step() == []


def test_cancelling_shows_the_text_that_was_held_back():
    fake, _ = scripted(b"hello\xf0\x9f")
    engine = make_engine(fake)
    engine.submit(request(stop=("low",)))
    texts = [engine.step()[0].text for _ in range(7)]
    assert "".join(texts) == "hel"
    [output] = engine.cancel("r")
    assert (output.text, output.token_ids, output.finish_reason) == ("lo\ufffd", [], FinishReason.CANCELLED)
    assert engine.cancel("nobody") == []


def test_a_failed_forward_pass_can_be_tried_again():
    class Flaky(FakeBackend):
        calls = 0

        def forward(self, batch):
            self.calls += 1
            if self.calls % 3 == 0:
                raise RuntimeError("the device fell off the bus")
            return super().forward(batch)

    expected, truth = plain_mixed()
    engine, parts = make_engine(Flaky(VOCAB_SIZE, num_blocks=300), drafter=ScriptedDrafter(truth, 0.3)), {}
    for each in mixed_requests():
        engine.submit(each)
    while engine.has_unfinished:
        try:
            outputs = engine.step()
        except RuntimeError:
            engine.check()
            continue
        for output in outputs:
            parts.setdefault((output.request_id, output.index), []).append(output)
    assert {key: seen(joined(outputs)) for key, outputs in parts.items()} == expected


def test_generate_returns_whole_outputs_in_order_and_cancels_all_if_one_is_refused():
    engine = make_engine(backend())
    outputs = engine.generate(mixed_requests())
    assert [(o.request_id, o.index) for o in outputs][-3:] == [("choices", 0), ("choices", 1), ("choices", 2)]
    assert {(o.request_id, o.index): seen(o) for o in outputs} == plain_mixed()[0]
    with pytest.raises(Exception, match="`prompt` has no tokens"):
        engine.generate([request("good"), request("bad", b"")])
    assert not engine.has_unfinished
    engine.check()


def test_an_identifier_is_free_again_when_its_request_is_over():
    engine = make_engine(backend())
    engine.submit(request())
    with pytest.raises(Exception, match="`request_id` 'r' is that of an unfinished request"):
        engine.submit(request())
    engine.cancel("r")
    engine.submit(request())
    assert engine.num_waiting == 1


def test_limits_hold_in_every_step():
    requests = [request(str(i), PROMPT[: 3 + 2 * i], max_tokens=10 + i, ignore_eos=True) for i in range(9)]
    engine = make_engine(backend(), max_batch_size=4, total_token_limit=75)
    for each in requests:
        engine.submit(each)
    most_running = most_tokens = 0
    while engine.has_unfinished:
        engine.step()
        running = engine._scheduler.running
        most_running = max(most_running, len(running))
        most_tokens = max(most_tokens, sum(s.num_prompt_tokens + s.sampling.max_tokens for s in running))
    assert most_running == 4
    assert 60 < most_tokens <= 75


def test_no_more_sequences_run_than_there_are_rows():
    engine = make_engine(backend(), max_batch_size=8, max_num_tokens=3)
    for each in range(6):
        engine.submit(request(str(each), b"a", max_tokens=4, ignore_eos=True))
    for _ in range(4):
        assert len(engine.step()) == 3
        assert engine.num_running <= 3


def test_without_chunks_a_stream_of_prompts_does_not_stop_those_that_are_decoding():
    engine = make_engine(backend(), max_batch_size=4, max_num_tokens=8, enable_chunked_prefill=False)
    engine.submit(request("long", b"a", max_tokens=20, ignore_eos=True))
    num_tokens = 0
    for step in range(40):
        engine.submit(request(str(step), (step, *PROMPT[:7]), max_tokens=1))  # a whole step's rows
        num_tokens += sum(len(output.token_ids) for output in engine.step() if output.request_id == "long")
    assert num_tokens == 20


def test_lower_priority_numbers_run_first():
    engine = make_engine(backend(), max_batch_size=1)
    for request_id, priority in (("late", 5), ("soon", -1), ("normal", 0), ("normal too", 0)):
        engine.submit(Request(request_id, PROMPT, SamplingParams(temperature=0, max_tokens=2), priority=priority))
    order = []
    while engine.has_unfinished:
        order += [output.request_id for output in engine.step() if output.finish_reason]
    assert order == ["soon", "normal", "normal too", "late"]


def test_gauges_are_up_to_date_between_any_two_calls():
    engine = make_engine(backend(num_blocks=10, block_size=4), max_batch_size=1)
    metrics = engine.metrics

    def gauges():
        return metrics.num_requests_running, metrics.num_requests_waiting, metrics.kv_cache_usage_perc

    engine.submit(request("one", b"abcdef", max_tokens=10))
    engine.submit(request("two", b"abcdef", max_tokens=10, n=2))
    assert gauges() == (0, 3, 0.0)
    engine.step()
    assert gauges() == (1, 2, pytest.approx(0.2))
    engine.cancel("one")
    assert gauges() == (0, 2, 0.0)
    engine.step()
    assert gauges() == (1, 1, pytest.approx(0.2))
    engine.cancel("two")
    assert gauges() == (0, 0, 0.0)


def prompt_logprobs_by_hand(fake, prompt, num_top):
    """From the logits that the backend gives for each beginning of the prompt."""
    rows = np.array([fake._logits(list(prompt[:end])) for end in range(1, len(prompt))], dtype=np.float32)
    rows = torch.from_numpy(rows.reshape(len(prompt) - 1, fake.vocab_size))
    return [None, *token_logprobs(rows, prompt[1:], num_top)]


@pytest.mark.parametrize("limits", [{}, {"max_num_tokens": 8}, {"enable_chunked_prefill": False}])
def test_prompt_logprobs_are_those_of_the_prompt_however_it_is_computed(limits):
    asks = [request(str(i), PROMPT[: 5 + 3 * i], prompt_logprobs=2, n=1 + i % 2, max_tokens=4) for i in range(5)]
    asks += [request("one token", b"x", prompt_logprobs=1), request("cached", PROMPT, max_tokens=3)]
    fake = backend()
    outputs, _ = run(asks, fake, drafter=SuffixDrafter(100, 2), **limits)
    for ask in asks:
        expected = None
        if ask.sampling.prompt_logprobs is not None:
            expected = prompt_logprobs_by_hand(fake, ask.prompt_token_ids, ask.sampling.prompt_logprobs)
        assert outputs[ask.request_id, 0].prompt_logprobs == expected
    without = [dataclasses.replace(a, sampling=dataclasses.replace(a.sampling, prompt_logprobs=None)) for a in asks]
    assert {key: seen(output) for key, output in outputs.items()} == seen_all(without)


def test_prompt_logprobs_survive_preemption():
    fake = backend(num_blocks=14)
    asks = [request(str(i), PROMPT, prompt_logprobs=1, max_tokens=20) for i in range(3)]
    outputs, engine = run(asks, fake, scheduler_policy="max_utilization", max_num_tokens=10)
    assert engine.metrics.num_preemptions > 0
    expected = prompt_logprobs_by_hand(fake, PROMPT, 1)
    assert all(output.prompt_logprobs == expected for output in outputs.values())


@pytest.mark.parametrize("sampling", [{}, {"seed": 4, "temperature": 1.0}, {"logprobs": 2}, {"frequency_penalty": 0.7}])
@pytest.mark.parametrize("drafter", [None, "suffix", "hostile"])
def test_predictions_change_nothing_but_the_number_of_rounds(sampling, drafter):
    make = {None: lambda: None, "suffix": lambda: SuffixDrafter(100, 2), "hostile": lambda: ScriptedDrafter(None, 1.0)}
    plain, _ = run([request(max_tokens=60, **sampling)])
    text = tuple(plain["r", 0].token_ids)
    for prediction in (text, text[9:40], (1, *text[:20], 7, 7, *text[20:]), tuple(reversed(text)), (5,)):
        ask = dataclasses.replace(request(max_tokens=60, **sampling), prediction_token_ids=prediction)
        outputs, _ = run([ask], drafter=make[drafter]())
        assert seen(outputs["r", 0]) == seen(plain["r", 0])
        stats = outputs["r", 0].stats
        if prediction == text:
            assert stats.num_rounds < 15 and outputs["r", 0].origins.count("prediction") >= 45
    ask = dataclasses.replace(ask, prediction_token_ids=text, speculation=SpeculationParams(enabled=False))
    outputs, _ = run([ask], drafter=make[drafter]())
    assert seen(outputs["r", 0]) == seen(plain["r", 0]) and outputs["r", 0].stats.num_draft_tokens == 0


def test_salted_requests_share_no_prefix():
    engine = make_engine(backend())
    hits = []
    for number, salt in enumerate((None, "a", "a", None, "b", "")):
        before = engine.metrics.prefix_cache_hits
        engine.generate([dataclasses.replace(request(str(number)), cache_salt=salt)])
        hits.append(engine.metrics.prefix_cache_hits - before)
    assert hits == [0, 0, 20, 20, 0, 0]
