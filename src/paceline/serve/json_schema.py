"""JSON schemas made strict: an object that lists its properties has no others, unless its schema says so.

That is what OpenAI's strict mode asks every schema to say itself; models given the choice add keys. Knows schemas only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Where the sub-schemas of a schema are: by value, by each item of a list, by each value of a mapping.
_ONE = ("items", "additionalItems", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Beside these an object's properties are the sum of several schemas: closing one would refuse the others'.
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "patternProperties", "unevaluatedProperties")
_CONDITIONS = ("if", "then", "else", "dependentSchemas")  # never whole descriptions of a value
_CLOSED_ALREADY = ("additionalProperties", "unevaluatedProperties")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` with `additionalProperties: false` wherever an object has `properties` and says nothing of others.

    Left open are schemas whose properties add to another's (`allOf` and the like, by reference too). Raises
    RecursionError for a schema nested too deeply to be looked at.
    """
    open_places: set[str] = set()
    while True:
        num_open = len(open_places)
        result = _close(schema, "#", False, open_places)
        if len(open_places) == num_open:  # nothing more was found that a reference opens
            return result


def _close(schema: Any, path: str, is_part: bool, open_places: set[str]) -> Any:
    """`is_part`: the properties of this schema add to those of the schema around it."""
    if not isinstance(schema, Mapping):
        return schema
    is_part = is_part or path in open_places
    combines = "properties" in schema and any(key in schema for key in _COMBINING)
    if isinstance(schema.get("$ref"), str) and (is_part or combines):
        open_places.add(schema["$ref"])
    result = dict(schema)
    for key, place, part in _parts(schema):
        if key == "not":  # a stricter part would make the whole looser
            continue
        adds = key in _COMBINING and (is_part or combines or (key == "allOf" and len(schema["allOf"]) > 1))
        adds = adds or key in _CONDITIONS
        inner = _close(part, f"{path}/{key}/{place}", adds, open_places)
        if place is None:
            result[key] = inner
        else:
            if result[key] is schema[key]:
                result[key] = schema[key].copy()
            result[key][place] = inner
    if "properties" in schema and not (is_part or combines or any(key in schema for key in _CLOSED_ALREADY)):
        result["additionalProperties"] = False
    return result


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Every sub-schema directly in `schema`: (keyword, its name or index under the keyword if it has one, itself)."""
    for key, value in schema.items():
        if key in _MAPPINGS and isinstance(value, dict):
            yield from ((key, name, part) for name, part in value.items())
        elif (key in _LISTS or key == "items") and isinstance(value, list):
            yield from ((key, index, part) for index, part in enumerate(value))
        elif key in _ONE and isinstance(value, dict):
            yield key, None, value
