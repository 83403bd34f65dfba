"""One config file in: the schema, the Truss form, precedence, and the explanation of the result."""

from paceline.config.load import (
    LoadedConfig,
    Origin,
    load_config,
    parse_config,
    preset_names,
    preset_summary,
    preset_text,
)
from paceline.config.schema import (
    BuildOptions,
    Config,
    ModelReference,
    RuntimeOptions,
    SpeculationOptions,
    SuffixOptions,
)
from paceline.config.truss import Note

__all__ = [
    "BuildOptions",
    "Config",
    "LoadedConfig",
    "ModelReference",
    "Note",
    "Origin",
    "RuntimeOptions",
    "SpeculationOptions",
    "SuffixOptions",
    "load_config",
    "parse_config",
    "preset_names",
    "preset_summary",
    "preset_text",
]
