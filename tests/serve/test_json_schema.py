"""Schemas made strict: what was valid without extra keys stays valid, extra keys do not, sums of schemas stay open."""

from __future__ import annotations

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from paceline.serve.json_schema import closed

POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x"]}


def valid(schema, value) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_extra_keys_are_refused_at_every_depth():
    schema = {"type": "object", "properties": {"p": POINT, "list": {"type": "array", "items": POINT},
                                               "either": {"anyOf": [POINT, {"type": "null"}]}}}  # fmt: skip
    strict = closed(schema)
    good = {"p": {"x": 1}, "list": [{"x": 1, "y": 2}], "either": None}
    assert valid(strict, good) and valid(schema, good)
    for bad in (good | {"z": 1}, good | {"p": {"x": 1, "z": 2}}, good | {"list": [{"x": 1, "z": 2}]},
                good | {"either": {"x": 1, "z": 2}}):  # fmt: skip
        assert valid(schema, bad) and not valid(strict, bad)
    assert "additionalProperties" not in schema and "additionalProperties" not in POINT, "the original is left alone"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "$ref": "#/$defs/B", "$defs": {"B": {"properties": {"b": {}}}}},
        {"properties": {"a": {}}, "$ref": "#/$defs/C",
         "$defs": {"C": {"$ref": "#/$defs/B"}, "B": {"properties": {"b": {}}}}},
        {"properties": {"a": {}}, "patternProperties": {"^b": {}}},
        {"properties": {"a": {}}, "if": {"properties": {"a": {"const": 1}}}, "then": {"properties": {"b": {}}}},
    ],
)  # fmt: skip
def test_what_says_so_or_adds_up_stays_open(schema):
    assert valid(closed(schema), {"a": 1, "b": 2})


class Inner(BaseModel):
    name: str
    tags: dict[str, int] = {}


class Outer(BaseModel):
    inner: Inner
    others: list[Inner | int] = []
    tree: Outer | None = None


def test_schemas_that_pydantic_writes():
    strict = closed(Outer.model_json_schema())
    value = {"inner": {"name": "a", "tags": {"any": 1}}, "others": [3, {"name": "b"}], "tree": {"inner": {"name": "c"}}}
    assert valid(strict, value)
    value["tree"]["inner"]["size"] = 1
    assert not valid(strict, value)


schemas = st.recursive(
    st.sampled_from([{}, {"type": "integer"}, True, {"$ref": "#/$defs/d"}, {"type": "null"}]),
    lambda inner: st.fixed_dictionaries(
        {"properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=2)},
        optional={"items": inner, "additionalProperties": st.booleans() | inner},
    )
    | st.fixed_dictionaries({"anyOf": st.lists(inner, min_size=1, max_size=2)})
    | st.fixed_dictionaries({"allOf": st.lists(inner, min_size=1, max_size=2)}),
    max_leaves=6,
)
values = st.recursive(st.integers(0, 1) | st.none(), lambda v: st.dictionaries(st.sampled_from("abcd"), v, max_size=3))


@given(schemas, values)
@settings(max_examples=300, deadline=None)
def test_strict_schemas_allow_nothing_new(schema, value):
    schema = {"$defs": {"d": POINT}} | (schema if isinstance(schema, dict) else {})
    strict = closed(schema)
    assert not valid(strict, value) or valid(schema, value)
    assert closed(strict) == strict


def test_nonsense_is_left_as_it_is():
    for schema in ({"properties": []}, {"anyOf": {}}, {"items": 5}, {"properties": {"a": 7}, "$defs": None}):
        closed(schema)
