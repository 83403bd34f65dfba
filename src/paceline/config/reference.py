"""The reference documentation of the config, as Markdown generated from the schemas. Writes no file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from paceline.config.load import preset_names, preset_text
from paceline.config.options import REQUIRED, list_options, section_of
from paceline.config.schema import Config, Options
from paceline.config.truss_schema import MARKS, Becomes, NoEffect, Only, TrussFile

INTRODUCTION = """\
# Config reference

Generated from `src/paceline/config`; do not edit. To write it anew:
`python -m paceline.config.reference > docs/config.md`.

One YAML file describes an engine. Only `model` is required:

```yaml
model: Qwen/Qwen2.5-Coder-14B-Instruct
speculation: {draft: Qwen/Qwen2.5-Coder-0.5B-Instruct, num_draft_tokens: 4}
```

A value is taken from the first of: the command line (`--set build.max_batch_size=8`), the environment
(`PACELINE_BUILD__MAX_BATCH_SIZE=8`), the file, the preset that the file names (`preset: NAME`), the default. Local
paths are relative to the working directory. `paceline check FILE` prints every value with where it is from. A key
that is not listed here is refused.

A model is a hub id, a local directory, a `.gguf` file or `package:NAME`, either as plain text or as
`{repo: ..., revision: ..., source: auto|hub|local|gguf|package}`. `speculation: auto`, `off` and `suffix` are short
for `speculation: {method: ...}`.
"""

TRUSS_INTRODUCTION = """\
## The Truss form

A file with a `trt_llm` block is read in the Truss form, and refused where Truss's own rules refuse it. Runtime fields
found under `trt_llm.build` are moved, with a warning. Fields that a file leaves out take the defaults above, not
Truss's. `inference_stack: v2` is read too. Every field, and what becomes of it:
"""


def reference_markdown() -> str:
    """The whole of docs/config.md."""
    parts = [INTRODUCTION, "## Options\n", _options_table(), "## Presets\n", _presets(), TRUSS_INTRODUCTION]
    return "\n".join([*parts, "| field | here |\n|---|---|", *_truss_rows(TrussFile), ""])


def _options_table() -> str:
    rows = ["| option | must be | default | |", "|---|---|---|---|"]
    for option in list_options(Config):
        default = "required" if option.default is REQUIRED else f"`{json.dumps(option.default)}`"
        rows.append(f"| `{option.path}` | {option.expects} | {default} | {option.doc} |")
    return "\n".join(rows) + "\n"


def _presets() -> str:
    lines = []
    for name in preset_names():
        lines.append(f"`preset:{name}`\n\n```yaml\n{preset_text(name)}```\n")
    return "\n".join(lines)


def _truss_rows(model: type[Options], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        mark = next(item for item in info.metadata if isinstance(item, MARKS))
        yield f"| `{prefix}{name}` | {_becomes(mark)} |"
        section = section_of(info)
        # A draft's own block repeats the target's fields, and nothing below a field without effect has one.
        if section is not None and not isinstance(mark, NoEffect) and prefix != "trt_llm.build.speculator.":
            yield from _truss_rows(section, f"{prefix}{name}.")


def _becomes(mark: Any) -> str:
    if isinstance(mark, Becomes):
        return f"`{mark.path}`"
    if isinstance(mark, NoEffect):
        return f"no effect: {mark.why}"
    if isinstance(mark, Only):
        allowed = " or ".join(f"`{json.dumps(value)}`" for value in mark.values)
        return f"only {allowed}: {mark.why}"
    return mark.how


if __name__ == "__main__":
    print(reference_markdown(), end="")
