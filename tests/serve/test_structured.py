"""Structured output parameters: each spelling, and every refusal by name."""

from __future__ import annotations

import json

import pytest

from paceline.errors import RequestError
from paceline.runtime.grammar import GrammarSpec
from paceline.serve.structured import grammar_from_request

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA)
STRICT = json.dumps(SCHEMA | {"additionalProperties": False})


@pytest.mark.parametrize(
    ("body", "spec"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}, "guided_json": None}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object", field="response_format")),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
         GrammarSpec("json_schema", STRICT, "response_format.json_schema.schema")),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": False, "schema": SCHEMA}}},
         GrammarSpec("json_schema", TEXT, "response_format.json_schema.schema")),
        ({"guided_json": SCHEMA}, GrammarSpec("json_schema", STRICT, "guided_json")),
        ({"guided_json": TEXT}, GrammarSpec("json_schema", STRICT, "guided_json")),
        ({"guided_regex": "a+"}, GrammarSpec("regex", "a+", "guided_regex")),
        ({"guided_choice": ["a", "b"]}, GrammarSpec("choice", '["a", "b"]', "guided_choice")),
        ({"guided_grammar": "start: /a/"}, GrammarSpec("grammar", "start: /a/", "guided_grammar")),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+", "structured_outputs.regex")),
        ({"structured_outputs": {"json_object": True}}, GrammarSpec("json_object", field="structured_outputs")),
    ],
)  # fmt: skip
def test_every_spelling(body, spec):
    assert grammar_from_request(body) == spec


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"response_format": "json"}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
         "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
         "response_format.json_schema.strict"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_grammar": 1}, "guided_grammar"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)  # fmt: skip
def test_refusals_name_the_parameter(body, field):
    with pytest.raises(RequestError) as refused:
        grammar_from_request(body)
    assert refused.value.field == field


def test_schemas_nested_beyond_all_reason_are_refused_by_name():
    schema: dict = {}
    for _ in range(5000):
        schema = {"items": schema}
    for body, field in (({"guided_json": schema}, "guided_json"),
                        ({"structured_outputs": {"json": schema}}, "structured_outputs.json")):  # fmt: skip
        with pytest.raises(RequestError) as caught:
            grammar_from_request(body)
        assert caught.value.field == field and "nested too deeply" in caught.value.message
