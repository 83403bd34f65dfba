"""One config file in: the schema, the Truss form, precedence, and the explanation of the result."""

from paceline.config.load import (
    LoadedConfig,
    Origin,
    Override,
    load_config,
    override_runtime,
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
    "Override",
    "RuntimeOptions",
    "SpeculationOptions",
    "SuffixOptions",
    "load_config",
    "override_runtime",
    "parse_config",
    "preset_names",
    "preset_summary",
    "preset_text",
]
