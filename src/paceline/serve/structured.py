"""From a request body to the grammar of its output: `response_format`, vLLM's `guided_*` and `structured_outputs`.

Schemas are strict: an object has no properties but those its schema lists (`json_schema.py`), unless it says otherwise
or `strict` is false. Knows those parameters' shapes. Knows nothing of tokens, or of tools (`tools.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.errors import RequestError
from paceline.runtime.grammar import GrammarSpec
from paceline.serve.json_schema import closed

_KINDS = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def grammar_from_request(body: Mapping[str, Any]) -> GrammarSpec | None:
    """The grammar a body asks for, None if it asks for none.

    Reads `response_format` (text, json_object, json_schema), `guided_json`, `guided_regex`, `guided_choice`,
    `guided_grammar`, and `structured_outputs` ({json | regex | choice | grammar | json_object}); others are not
    touched, null is absent. Raises RequestError naming the parameter if one is malformed, or if there are several.
    """
    found = [_from_response_format(body["response_format"])] if body.get("response_format") is not None else []
    for name, kind in _KINDS.items():
        field = f"guided_{name}"
        if body.get(field) is not None:
            found.append(_spec(kind, body[field], field))
    if body.get("structured_outputs") is not None:
        found.append(_from_structured_outputs(body["structured_outputs"]))
    specs = [spec for spec in found if spec is not None]
    if len(specs) > 1:
        raise RequestError(
            f"`{specs[0].field}` and `{specs[1].field}` both constrain the output.",
            "send one of them",
            field=specs[1].field,
        )
    return specs[0] if specs else None


def _from_response_format(value: Any) -> GrammarSpec | None:
    field = "response_format"
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec("json_object", field=field)
    if kind != "json_schema":
        raise _malformed(f"{field}.type", '"text", "json_object" or "json_schema"', kind)
    wrapper = value.get("json_schema")
    if not isinstance(wrapper, Mapping):
        raise _malformed(f"{field}.json_schema", 'an object with a "schema"', wrapper)
    if not isinstance(wrapper.get("strict"), bool | None):
        raise _malformed(f"{field}.json_schema.strict", "true or false", wrapper["strict"])
    strict = wrapper.get("strict") is not False
    return _spec("json_schema", wrapper.get("schema", {"type": "object"}), f"{field}.json_schema.schema", strict)


def _from_structured_outputs(value: Any) -> GrammarSpec:
    field = "structured_outputs"
    names = (*_KINDS, "json_object")
    given = {key: item for key, item in value.items() if item is not None} if isinstance(value, Mapping) else {}
    if len(given) != 1 or not given.keys() <= set(names):
        raise _malformed(field, f"an object with exactly one of {', '.join(names)}", value)
    [(name, item)] = given.items()
    if name != "json_object":
        return _spec(_KINDS[name], item, f"{field}.{name}")
    if item is not True:
        raise _malformed(f"{field}.json_object", "true", item)
    return GrammarSpec("json_object", field=field)


def _spec(kind: str, value: Any, field: str, strict: bool = True) -> GrammarSpec:
    """`value` in the form a GrammarSpec of `kind` has. `strict`: objects have no properties but those listed."""
    if kind == "json_schema":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise RequestError(
                    f"`{field}` is no valid JSON: {error}.", "send the schema itself, or its JSON text", field=field
                ) from error
        if not isinstance(value, Mapping):
            raise _malformed(field, "a JSON schema (an object)", value)
        return GrammarSpec("json_schema", json.dumps(strict_schema(value, field) if strict else value), field)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
            raise _malformed(field, "a list of non-empty strings, at least one", value)
        return GrammarSpec("choice", json.dumps(value), field)
    if not isinstance(value, str) or not value:
        raise _malformed(field, "a non-empty string", value)
    return GrammarSpec(kind, value, field)


def strict_schema(schema: Mapping[str, Any], field: str) -> dict[str, Any]:
    """`closed(schema)`; raises RequestError naming `field` where it is nested too deeply."""
    try:
        return closed(schema)
    except RecursionError as error:
        raise RequestError(f"`{field}` is nested too deeply.", "send a flatter schema", field=field) from error


def _malformed(field: str, wanted: str, value: Any) -> RequestError:
    shown = repr(value) if len(repr(value)) <= 100 else repr(value)[:97] + "..."
    return RequestError(f"`{field}` must be {wanted}, got {shown}.", f"correct `{field}` or leave it out", field=field)
