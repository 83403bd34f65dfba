"""Say what a config resolved to and where each value came from, as rows. Pure: no printing, no files, no models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.config.load import LoadedConfig, Origin
from paceline.config.options import list_options
from paceline.config.schema import ModelReference


@dataclass(frozen=True)
class Row:
    """One option of a resolved config. `value` is a JSON scalar (a model reference as text); `doc` is one line."""

    path: str
    value: str | int | float | bool | None
    origin: Origin
    doc: str


def explain(loaded: LoadedConfig) -> list[Row]:
    """One row per option, in the order of the schema, defaults included."""
    return [
        Row(option.path, _value(loaded.config, option.path), loaded.origin(option.path), option.doc)
        for option in list_options()
    ]


def _value(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return str(config) if isinstance(config, ModelReference) else config
