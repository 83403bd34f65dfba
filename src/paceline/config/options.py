"""Read the options back from pydantic models: path, type in words, default, doc. Works for any `Options` tree.

Messages, the reference documentation, `paceline check` and the command line's `--set` all read options from here, so
they cannot disagree with the schema. Knows no values and no files.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from paceline.config.schema import REFERENCE_FORMS, Config, ModelReference, Options

REQUIRED = "(required)"


@dataclass(frozen=True)
class Option:
    """One leaf of the config. `expects` completes the sentence "must be ..."; `default` is a value or REQUIRED."""

    path: str
    expects: str
    default: Any
    doc: str


def list_options(model: type[Options] = Config, prefix: str = "") -> list[Option]:
    """Every leaf option below `model`, in the order of the schema. A model reference counts as one leaf."""
    options = []
    for name, info in model.model_fields.items():
        section = section_of(info)
        if section is None or section is ModelReference:
            default = REQUIRED if info.is_required() else info.get_default(call_default_factory=True)
            options.append(Option(prefix + name, expectation(info), default, info.description or ""))
        else:
            options.extend(list_options(section, f"{prefix}{name}."))
    return options


def section_of(info: FieldInfo) -> type[Options] | None:
    """The model class a field holds, or None for a plain value."""
    for candidate in _alternatives(info.annotation):
        if isinstance(candidate, type) and issubclass(candidate, Options):
            return candidate
    return None


def field_at(model: type[Options], location: tuple[Any, ...]) -> FieldInfo | None:
    """The field a pydantic error location points to, or None where it points to none (an unknown key, a list item)."""
    info: FieldInfo | None = None
    here: type[Options] | None = model
    for name in location:
        if here is None or name not in here.model_fields:
            return None
        info = here.model_fields[name]
        here = section_of(info)
    return info


def expectation(info: FieldInfo) -> str:
    """What a value of this field must be, bounds included, in words."""
    alternatives = list(_alternatives(info.annotation))
    optional = "" if type(None) not in alternatives else " (or left out)" if info.default is None else " (or `null`)"
    kind = next((item for item in alternatives if item is not type(None)), Any)
    bounds = _bounds([*info.metadata, *_metadata(info.annotation)])
    if get_origin(kind) is Literal:
        return f"one of {', '.join(f'`{value}`' for value in get_args(kind))}{optional}"
    if kind is bool:
        return f"`true` or `false`{optional}"
    if kind is int:
        return f"a whole number{bounds}{optional}"
    if kind is float:
        return f"a number{bounds}{optional}"
    if kind is str:
        return f"one line of text{optional}"
    if kind is ModelReference:
        return REFERENCE_FORMS + optional
    if kind is Any:
        return "anything"
    if get_origin(kind) in (list, tuple):
        return f"a list{optional}"
    return f"a mapping{optional}"


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The members of a union, with `Annotated` peeled off."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _alternatives(member)
    else:
        yield annotation


def _metadata(annotation: Any) -> list[Any]:
    """The `Annotated` metadata found at any depth of a union."""
    found: list[Any] = []
    if get_origin(annotation) is Annotated:
        inner, *found = get_args(annotation)
        return found + _metadata(inner)
    for member in get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ():
        found += _metadata(member)
    return found


def _bounds(metadata: list[Any]) -> str:
    limits: dict[str, Any] = {}
    for item in metadata:
        for constraint in [item, *getattr(item, "metadata", ())]:
            for name in ("ge", "gt", "le", "multiple_of"):
                if getattr(constraint, name, None) is not None:
                    limits[name] = getattr(constraint, name)
    step = f" divisible by {limits['multiple_of']}" if "multiple_of" in limits else ""
    if "ge" in limits and "le" in limits:
        return f"{step} from {limits['ge']} to {limits['le']}"
    if "gt" in limits and "le" in limits:
        return f"{step} above {limits['gt']} and at most {limits['le']}"
    return f"{step} of at least {limits['ge']}" if "ge" in limits else step
