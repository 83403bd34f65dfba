"""Grammars: what they allow and refuse, and that speculation under them changes nothing."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
import torch

from fake_engine import EOS, TOKENIZER, VOCAB_SIZE, ScriptedDrafter, make_engine
from paceline.errors import RequestError
from paceline.runtime.backend_fake import FakeBackend
from paceline.runtime.drafting.drafter import Draft
from paceline.runtime.drafting.suffix import SuffixDrafter
from paceline.runtime.grammar import MAX_GRAMMAR_CHARACTERS, Grammars, GrammarSpec
from paceline.runtime.sampling import SamplingParams, TorchSamplingKernels, shape_logits
from paceline.runtime.sequence import FinishReason, Request, Sequence, SpeculationParams
from paceline.runtime.verify import Verifier

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
SPECS = {
    "json_object": GrammarSpec("json_object"),
    "json_schema": GrammarSpec("json_schema", json.dumps(SCHEMA)),
    "regex": GrammarSpec("regex", "(ab|ba){2,9}-[0-9]{3}"),
    "choice": GrammarSpec("choice", json.dumps(["yes, it is", "yes", "no"])),
    "grammar": GrammarSpec("grammar", 'start: item ("," item)* "."\nitem: "x" | "[" item "]"'),
}


TOO_WIDE = json.dumps(
    {"anyOf": [{"type": "object", "properties": {f"k{i}_{j}": {} for j in range(40)}} for i in range(40)]}
)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, VOCAB_SIZE, [EOS])


def allowed(matcher, draft=()) -> set[int]:
    bits = matcher.allowed(draft, VOCAB_SIZE)
    return set(range(VOCAB_SIZE)) if bits is None else set(np.flatnonzero(bits).tolist())


class TestMatcher:
    def test_masks_per_position_leave_it_where_it_is(self, grammars):
        matcher = grammars.matcher(GrammarSpec("regex", "ab?c*"))
        assert allowed(matcher) == {ord("a")}
        assert allowed(matcher, list(b"a")) == {ord("b"), ord("c"), EOS}
        assert allowed(matcher, list(b"abc")) == {ord("c"), EOS}
        assert allowed(matcher) == {ord("a")}

    def test_end_of_sequence_only_where_the_text_may_end(self, grammars):
        matcher = grammars.matcher(SPECS["choice"])
        for token in b"yes":
            assert EOS not in allowed(matcher)
            assert matcher.consume(token)
        assert EOS in allowed(matcher)
        assert not matcher.complete
        for token in b", it is":
            assert matcher.consume(token)
        assert matcher.complete

    def test_drafts_are_cut_at_the_first_token_refused(self, grammars):
        matcher = grammars.matcher(GrammarSpec("regex", "ab?c*"))
        assert matcher.permitted(list(b"accx")) == 3
        assert matcher.permitted([*b"ac", EOS, *b"c"]) == 3
        assert matcher.permitted([EOS]) == 0
        assert matcher.permitted(list(b"xa")) == 0
        assert grammars.matcher(GrammarSpec("regex", "ab")).permitted(list(b"abab")) == 2

    def test_forced_tokens(self, grammars):
        matcher = grammars.matcher(SPECS["json_schema"])
        assert bytes(matcher.forced()) == b'{"name": "'
        assert matcher.consume(ord("{"))
        assert bytes(matcher.forced()) == b'"name": "'
        assert grammars.matcher(SPECS["regex"]).forced() == []

    def test_a_refused_token_is_not_consumed(self, grammars):
        assert not grammars.matcher(SPECS["regex"]).consume(ord("x"))

    def test_two_matchers_of_one_spec_are_apart(self, grammars):
        first, second = (grammars.matcher(SPECS["json_schema"]) for _ in range(2))
        assert first.consume(ord("{"))
        assert allowed(second) == {ord("{")}


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec("regex", "(", "guided_regex"),
        GrammarSpec("regex", "a" * (MAX_GRAMMAR_CHARACTERS + 1), "guided_regex"),
        GrammarSpec("regex", "", "guided_regex"),
        GrammarSpec("json_schema", "{", "response_format.json_schema.schema"),
        GrammarSpec("json_schema", '{"type": "nonsense"}', "guided_json"),
        GrammarSpec("json_schema", '{"$ref": "http://example.com/a"}', "guided_json"),
        GrammarSpec("json_schema", '{"items":' * 1000 + "{}" + "}" * 1000, "guided_json"),
        GrammarSpec("json_schema", "false", "guided_json"),
        GrammarSpec("json_schema", TOO_WIDE, "guided_json"),
        GrammarSpec("grammar", "start: missing", "guided_grammar"),
        GrammarSpec("grammar", "root ::= (", "guided_grammar"),
        GrammarSpec("choice", '[""]', "guided_choice"),
    ],
    ids=lambda spec: f"{spec.kind}-{spec.text[:20]}",
)
def test_what_cannot_be_compiled_is_refused_by_name(grammars, spec):
    with pytest.raises(RequestError, match=re.escape(spec.field)) as refused:
        grammars.matcher(spec)
    assert refused.value.field == spec.field


@pytest.mark.parametrize("option", [{"min_tokens": 2}, {"ignore_eos": True}])
def test_a_grammar_says_where_the_output_ends(option):
    with pytest.raises(RequestError, match=next(iter(option))):
        SamplingParams(grammar=SPECS["regex"], **option)


def requests(sampling: SamplingParams, speculation: SpeculationParams) -> list[Request]:
    prompts = [b"name cat dog [x],[x]", b"abababab-123 yes", b"{ yes, it is", b"nothing"]
    return [Request(f"r{i}", tuple(prompt), sampling, speculation) for i, prompt in enumerate(prompts)]


ON, OFF = SpeculationParams(), SpeculationParams(enabled=False)


def run(engine, sampling, speculation=ON, together=True):
    wanted = requests(sampling, speculation)
    outputs = engine.generate(wanted) if together else [o for r in wanted for o in engine.generate([r])]
    engine.check()
    return outputs


def seen(outputs):
    return [(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in outputs]


def is_valid(name: str, text: str) -> bool:
    if name == "json_object":
        return isinstance(json.loads(text), dict)
    if name == "json_schema":
        value = json.loads(text)
        return list(value) == ["name", "kind"] and len(value["name"]) <= 6 and value["kind"] in ("cat", "dog")
    patterns = {"regex": "(ab|ba){2,9}-[0-9]{3}", "choice": "yes, it is|yes|no", "grammar": r"[x,\[\]]+\."}
    return re.fullmatch(patterns[name], text) is not None


FEATURES = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "logit_bias": {"logit_bias": {ord("a"): 2.0, ord("x"): -100.0}},
    "min_p": {"min_p": 0.05, "top_k": 5},
    "stop": {"stop": ("c", "-1")},
    "logprobs": {"logprobs": 3},
}


@pytest.mark.parametrize("mode", ["greedy", "seeded"])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", [pytest.param(None, marks=pytest.mark.slow), *SPECS])
def test_speculation_under_a_grammar_changes_nothing(name, feature, mode):
    """Feature × drafter × γ × batch. The drafters: an oracle, one often wrong, suffix matches, none."""
    ways = {"temperature": 0.0} if mode == "greedy" else {"temperature": 1.0, "seed": 7}
    grammar = None if name is None else SPECS[name]
    sampling = SamplingParams(max_tokens=60, grammar=grammar, **ways, **FEATURES[feature])
    alone = run(make_engine(), sampling, OFF, together=False)
    assert all(set(o.origins) <= {"target"} for o in alone)
    if name is not None and feature != "stop":
        assert all(is_valid(name, o.text) for o in alone if o.finish_reason is FinishReason.STOP)
    truth = {f"r{i}/0": o.token_ids for i, o in enumerate(alone)}
    drafters = [lambda e=e: ScriptedDrafter(truth, error_rate=e) for e in (0.0, 0.3)]
    drafters += [lambda: SuffixDrafter(10_000, 1), lambda: None]
    for make_drafter, gamma in itertools.product(drafters, (1, 4, 15)):
        engine = make_engine(drafter=make_drafter(), num_draft_tokens=gamma)
        assert seen(run(engine, sampling)) == seen(alone)
    engine = make_engine(drafter=ScriptedDrafter(truth, error_rate=0.3))
    assert seen(run(engine, sampling, together=False)) == seen(alone)


def test_forced_tokens_are_drafted_for_free_and_always_accepted():
    sampling = SamplingParams(temperature=0.0, max_tokens=60, grammar=SPECS["json_schema"])
    plain = run(make_engine(), sampling, OFF)
    forced = run(make_engine(), sampling)
    assert seen(forced) == seen(plain)
    for output in forced:
        assert output.origins.count("forced") >= len('"name": "')
        assert output.stats.num_accepted_tokens == output.stats.num_draft_tokens
        assert output.stats.num_rounds < len(output.token_ids)


def test_no_forced_drafts_where_speculation_is_off():
    sampling = SamplingParams(temperature=0.0, max_tokens=60, grammar=SPECS["json_schema"])
    for off in (OFF, SpeculationParams(num_draft_tokens=0)):
        assert all(o.stats.num_draft_tokens == 0 for o in run(make_engine(), sampling, off))


def test_choices_of_a_request_have_their_own_place_in_the_grammar():
    sampling = SamplingParams(temperature=1.0, seed=3, n=4, max_tokens=60, grammar=SPECS["regex"])
    outputs = make_engine().generate([Request("r", tuple(b"abba"), sampling)])
    assert len({o.text for o in outputs}) > 1
    assert all(is_valid("regex", o.text) for o in outputs)


def test_a_preempted_sequence_keeps_its_place():
    sampling = SamplingParams(temperature=1.0, seed=3, max_tokens=40, grammar=GrammarSpec("regex", "(ab|ba){20}"))
    plenty = run(make_engine(), sampling)
    backend = FakeBackend(VOCAB_SIZE, num_blocks=20)
    engine = make_engine(backend, max_seq_len=70, scheduler_policy="max_utilization")
    assert seen(run(engine, sampling)) == seen(plenty)
    assert engine.metrics.num_preemptions > 0


def test_a_grammar_that_outgrows_its_limits_cuts_the_output():
    spec = GrammarSpec("grammar", f"start: /[xy]{{5}}/ wide\nwide: %json {TOO_WIDE}")
    for speculation in (ON, OFF):
        engine = make_engine(max_seq_len=1000)
        sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=900, grammar=spec)
        [output] = engine.generate([Request("r", (65,), sampling, speculation)])
        assert output.finish_reason is FinishReason.LENGTH
        assert 5 < len(output.token_ids) < 20
        engine.check()


def test_a_refused_grammar_leaves_the_engine_as_it_was():
    engine = make_engine()
    with pytest.raises(RequestError):
        engine.submit(Request("r", (1,), SamplingParams(grammar=GrammarSpec("regex", "("))))
    assert not engine.has_unfinished


class TestUnseededSampling:
    """Rejection sampling under a grammar has the masked distribution, whatever was drafted."""

    NUM_SAMPLES = 4000

    @pytest.mark.parametrize("kind", ["none", "one-hot", "refused", "masked", "unmasked"])
    def test_chi_square(self, grammars, kind):
        torch.manual_seed(0)
        logits = torch.randn(2, VOCAB_SIZE)
        sequence = Sequence(Request("r", (1,), SamplingParams(temperature=1.0, max_tokens=9)))
        sequence.grammar = grammars.matcher(GrammarSpec("regex", "[a-f][0-3]"))
        target = torch.softmax(shape_logits(logits[:1], sequence, [], [EOS]), 1)[0].double().numpy()
        assert set(np.flatnonzero(target)) == set(b"abcdef")
        generator = np.random.default_rng(1)
        verifier = Verifier(TorchSamplingKernels(), np.random.default_rng(2), [EOS])
        q = np.zeros(VOCAB_SIZE)
        q[list(b"abcdef" if kind == "masked" else b"abcxyz")] = [0.4, 0.2, 0.1, 0.1, 0.1, 0.1]
        counts = np.zeros(VOCAB_SIZE)
        for _ in range(self.NUM_SAMPLES):
            draft = {"none": Draft(), "one-hot": Draft([ord("b")]), "refused": Draft([ord("x")])}.get(kind)
            if draft is None:
                token_id = int(generator.choice(VOCAB_SIZE, p=q))
                draft = Draft([token_id], torch.tensor(q, dtype=torch.float32)[None])
            [verdict] = verifier.verify_batch([sequence], [draft], logits[: len(draft) + 1], [0])
            counts[verdict.token_ids[0]] += 1
        kept = target > 0
        assert counts[~kept].sum() == 0
        expected = target[kept] * self.NUM_SAMPLES
        statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
        assert statistic < 20.5  # the 99.9 % quantile of chi-square with 5 degrees of freedom
