"""Grammars on engines with a real tokenizer and real drafters: speculation changes no token and no bit, and what is not
cut by `max_tokens` is valid. Grammar × feature × drafter × γ × batch.
"""

from __future__ import annotations

import itertools
import json
import re

import pytest

from paceline.assemble import OpenEngine, open_engine
from paceline.build.builder import build_engine
from paceline.config import parse_config
from paceline.runtime.grammar import GrammarSpec
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.sequence import FinishReason, Request, SpeculationParams
from paceline.serve.tools import grammar_from_tools

OFF = SpeculationParams(enabled=False)
METHODS = ("suffix", "draft", "hybrid")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["first", "second"]}, "maxItems": 3},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "tags", "count"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
REGEX = "(def|print) [a-z]{2,5}[(][0-9]{1,3}[)]"
CHOICES = ["def add", "def add_one", "return"]
SPECS = {
    "json_object": GrammarSpec("json_object"),
    "json_schema": GrammarSpec("json_schema", json.dumps(SCHEMA)),
    "regex": GrammarSpec("regex", REGEX),
    "choice": GrammarSpec("choice", json.dumps(CHOICES)),
    "tools": grammar_from_tools([TOOL], "required", False, "hermes"),
}
FEATURES = {
    "plain": {},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.3},
    "logit_bias": {"logit_bias": {5: 3.0, 40: -4.0}},
    "min_p": {"min_p": 0.1, "top_k": 20},
    "stop": {"stop": ("a", '", ')},
    "logprobs": {"logprobs": 4},
}
PROMPTS = [f"def add_{i}(first, second): return {i} + {i * 7}; print({i})" for i in range(3)]


@pytest.fixture(scope="module")
def opened(tiny, tmp_path_factory) -> OpenEngine:
    target, _ = tiny("llama")
    draft, _ = tiny("llama", num_hidden_layers=1)
    text = (
        f"model: {target}\nmax_seq_len: 256\nspeculation: {{method: hybrid, draft: {draft}}}\n"
        "build: {autotune: false}\nruntime: {kv_cache_bytes: 100000000}\n"
    )
    folder = tmp_path_factory.mktemp("engines") / "structured"
    build_engine(parse_config(text).config, folder)
    return open_engine(folder)


def run(opened, sampling, speculation, together=True):
    requests = [
        Request(f"r{i}", tuple(opened.tokenizer.encode(prompt).ids), sampling, speculation)
        for i, prompt in enumerate(PROMPTS)
    ]
    if together:
        outputs = opened.engine.generate(requests)
    else:
        outputs = [output for request in requests for output in opened.engine.generate([request])]
    opened.engine.check()
    return outputs


def seen(outputs):
    return [(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in outputs]


def check_valid(name: str, text: str) -> None:
    if name == "json_object":
        assert isinstance(json.loads(text), dict)
    elif name == "regex":
        assert re.fullmatch(REGEX, text)
    elif name == "choice":
        assert text in CHOICES
    else:
        call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
        value = call["arguments"] if name == "tools" else call
        assert list(value) == ["name", "tags", "count"]
        assert set(value["tags"]) <= {"first", "second"}


@pytest.mark.parametrize("mode", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 11}], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "feature", [pytest.param(f, marks=() if f in ("plain", "penalties") else pytest.mark.slow) for f in FEATURES]
)
@pytest.mark.parametrize("name", SPECS)
def test_speculation_changes_nothing(opened, name, feature, mode):
    sampling = SamplingParams(max_tokens=80, grammar=SPECS[name], **mode, **FEATURES[feature])
    plain = run(opened, sampling, OFF, together=False)
    for output in plain:
        if feature != "stop" and output.finish_reason is FinishReason.STOP:
            check_valid(name, output.text)
    assert seen(run(opened, sampling, OFF)) == seen(plain)
    for method, gamma in itertools.product(METHODS, (1, 4, 15)):
        outputs = run(opened, sampling, SpeculationParams(True, gamma, method))
        assert seen(outputs) == seen(plain), (method, gamma)
    assert seen(run(opened, sampling, SpeculationParams(True, 4, "hybrid"), together=False)) == seen(plain)


@pytest.mark.parametrize("name", ["json_schema", "tools"])
def test_forced_tokens_come_for_free(opened, name):
    outputs = run(opened, SamplingParams(temperature=0.0, max_tokens=120, grammar=SPECS[name]), SpeculationParams())
    for output in outputs:
        assert output.finish_reason is FinishReason.STOP
        assert output.origins.count("forced") > 5
        assert output.stats.num_rounds < len(output.token_ids)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", SPECS)
def test_unseeded_output_is_valid(opened, name, method):
    sampling = SamplingParams(temperature=1.2, max_tokens=150, grammar=SPECS[name])
    outputs = run(opened, sampling, SpeculationParams(True, 4, method))
    finished = [output for output in outputs if output.finish_reason is FinishReason.STOP]
    assert finished or name == "json_object"
    for output in finished:
        check_valid(name, output.text)
