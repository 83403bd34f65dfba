"""What is wrong with a config: pydantic's findings in our words, all of them in one `ConfigError`.

Knows the options (through `options.py`) and how to suggest a name. Knows no files: the caller says where a path was
written.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from paceline.config.options import expectation, field_at, list_options, section_of
from paceline.config.schema import Config, Options
from paceline.errors import ConfigError

MAX_SHOWN_CHARACTERS = 80
MAX_REPORTED_PROBLEMS = 30

# Names that users of vLLM, TensorRT-LLM, SGLang and llama.cpp may try first.
KNOWN_ELSEWHERE = {
    "checkpoint": "model",
    "ctx_size": "max_seq_len",
    "draft_model": "speculation.draft",
    "free_gpu_memory_fraction": "runtime.kv_cache_free_mem_fraction",
    "gpu_memory_utilization": "runtime.kv_cache_free_mem_fraction",
    "kv_cache_free_gpu_mem_fraction": "runtime.kv_cache_free_mem_fraction",
    "kv_cache_memory_bytes": "runtime.kv_cache_bytes",
    "max_model_len": "max_seq_len",
    "max_num_batched_tokens": "build.max_num_tokens",
    "max_num_seqs": "build.max_batch_size",
    "max_draft_len": "speculation.num_draft_tokens",
    "num_speculative_tokens": "speculation.num_draft_tokens",
    "speculative_config": "speculation",
    "speculator": "speculation",
    "threads": "build.num_threads",
    "enable_prefix_caching": "runtime.enable_prefix_cache",
    "enable_chunked_prefill": "runtime.enable_chunked_context",
    "quantization_type": "quantization",
    "resources": "nothing here: Paceline uses the machine it runs on",
}


@dataclass(frozen=True)
class Problem:
    """One thing wrong. `message` completes the sentence that starts with `path`; `where` is a place in a file."""

    path: str
    message: str
    hint: str
    where: str | None = None

    def __str__(self) -> str:
        place = "" if self.where is None else f" ({self.where})"
        return f"`{self.path}` {self.message}{place}" if self.path else f"The config {self.message}{place}"


def config_error(problems: Sequence[Problem], name: str) -> ConfigError:
    """One error for all problems of one config; `name` is what the config is called."""
    if len(problems) == 1:
        return ConfigError(str(problems[0]), problems[0].hint)
    shown = problems[:MAX_REPORTED_PROBLEMS]
    items = [f"{number}. {problem}\n   hint: {problem.hint}" for number, problem in enumerate(shown, start=1)]
    if len(problems) > len(shown):
        items.append(f"and {len(problems) - len(shown)} more")
    return ConfigError("\n\n".join([f"{name} has {len(problems)} problems:", *items]))


def problems_of(
    error: ValidationError, model: type[Options], where: Callable[[str], str | None] = lambda path: None
) -> list[Problem]:
    """Pydantic's findings about `model` as problems, in the order found, one per path and wording."""
    found = (_problem(details, model, where) for details in error.errors(include_url=False))
    return list(dict.fromkeys(found))


def _problem(details: Any, model: type[Options], where: Callable[[str], str | None]) -> Problem:
    location = tuple(details["loc"])
    path = join_path(location)
    if details["type"] == "paceline":
        context = details["ctx"]
        path = ".".join(filter(None, [path, context["path"]]))
        return Problem(path, context["message"], context["hint"], where(path))
    if details["type"] in ("extra_forbidden", "invalid_key"):
        if details["type"] == "invalid_key":
            location = location if str(location[-1:]) != "('[key]',)" else location[:-1]
        return unknown_option(location, model, where(path))
    info = field_at(model, location)
    if details["type"] == "missing":
        expects = "a value" if info is None else expectation(info)
        return Problem(path, "is missing", f"Give it {expects}.", where(path))
    expects = "a mapping" if not location else "something else" if info is None else expectation(info)
    return Problem(path, f"must be {expects}, got {shown(details['input'])}", _advice(info, details), where(path))


def _advice(info: Any, details: Any) -> str:
    value = details["input"]
    if details["type"] == "string_type" and isinstance(value, int | float | bool):
        return f'Quote it to make it text: "{shown(value)}".'
    if details["type"] in ("int_type", "float_type", "bool_type") and isinstance(value, str):
        return "Remove the quotes." if re.fullmatch(r"[-+]?[0-9.]+|true|false", value) else _doc(info)
    return _doc(info) if info is not None else "Write `key: value` lines."


def _doc(info: Any) -> str:
    doc = info.description
    if not doc:
        return "Correct it." if info.is_required() else "Correct it, or remove it."
    if info.is_required() or section_of(info) is not None:
        return doc
    return doc if info.default is None else f"{doc} The default is {shown(info.default)}."


def unknown_option(location: tuple[Any, ...], model: type[Options], where: str | None = None) -> Problem:
    """The problem of a key that no section of `model` has, with the nearest name that exists."""
    parent, name = location[:-1], str(location[-1])
    siblings = _names_in(model, parent)
    hint = _nearest(name, join_path(parent), siblings, model)
    return Problem(join_path(location), "is not an option", hint, where)


def _nearest(name: str, parent: str, siblings: list[str], model: type[Options]) -> str:
    by_leaf: dict[str, str] = {}
    for option in list_options(model):
        by_leaf.setdefault(option.path.rsplit(".", 1)[-1], option.path)
    if model is Config and name in KNOWN_ELSEWHERE:
        target = KNOWN_ELSEWHERE[name]
        return f"It is {target}." if " " in target else f"Here it is called `{target}`."
    if name in by_leaf:
        return f"It belongs at `{by_leaf[name]}`."
    close = difflib.get_close_matches(name.lower(), siblings, n=1, cutoff=0.6)
    if close:
        return f"Did you mean `{close[0]}`?"
    close = difflib.get_close_matches(name.lower(), list(by_leaf), n=1, cutoff=0.75)
    if close:
        return f"Did you mean `{by_leaf[close[0]]}`?"
    section = f"`{parent}`" if parent else "The top level"
    return f"{section} takes {', '.join(f'`{sibling}`' for sibling in siblings)}."


def _names_in(model: type[Options], location: tuple[Any, ...]) -> list[str]:
    for name in location:
        info = model.model_fields.get(name)
        section = None if info is None else section_of(info)
        if section is None:
            return []
        model = section
    return list(model.model_fields)


def join_path(location: Iterable[Any]) -> str:
    """A dotted path; keys that would garble a message or a terminal are quoted."""
    return ".".join(_plain(str(key)) for key in location)


def _plain(key: str) -> str:
    return key if re.fullmatch(r"[\w\-\[\]]{1,60}", key, re.ASCII) else shown(key)


def shown(value: Any) -> str:
    """A value as one short line of printable ASCII, whatever it is."""
    if value is None:
        return "nothing"
    if isinstance(value, dict | list) and not value:
        return "an empty mapping" if isinstance(value, dict) else "an empty list"
    if isinstance(value, dict):
        return f"a mapping with {join_path(list(value)[:1])}{', ...' if len(value) > 1 else ''}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, Options):
        return shown(str(value))
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = json.dumps(f"a {type(value).__name__}")
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 3]}..."
