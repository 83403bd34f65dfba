"""YAML text to a plain tree, strictly: no duplicate keys, no tags, nothing that grows when read.

Returns dicts, lists and scalars together with the line each path was written on. Knows no option of ours. Booleans
are `true` and `false` only, so that `speculation: off` stays the word it looks like (YAML 1.2, not 1.1).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from paceline.config.problems import join_path, shown
from paceline.errors import ConfigError

MAX_TEXT_BYTES = 256 * 1024
MAX_NODES = 5_000  # after aliases are expanded: a "yaml bomb" ends here
MAX_DEPTH = 32
MAX_SCALAR_DIGITS = 40  # integers beyond this stay text; no bound of ours is near

_PREFIX = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """SafeLoader that resolves only what YAML 1.2 calls null, bool, int and float."""


_Loader.yaml_implicit_resolvers = {}
_Loader.add_implicit_resolver(f"{_PREFIX}null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(f"{_PREFIX}bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    f"{_PREFIX}int", re.compile(rf"^[-+]?(?:0|[1-9][0-9_]{{0,{MAX_SCALAR_DIGITS}}})$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    f"{_PREFIX}float",
    re.compile(r"^[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]{1,3})?$"),
    list("-+.0123456789"),
)
_Loader.add_implicit_resolver(f"{_PREFIX}merge", re.compile(r"^<<$"), ["<"])


@dataclass(frozen=True)
class YamlTree:
    """`value` is the document; `lines` gives the 1-based line of each dotted path."""

    value: Any
    lines: dict[str, int] = field(default_factory=dict)


def parse_yaml(text: str, name: str) -> YamlTree:
    """Parse one document. `name` is what to call it in errors. Raises ConfigError, never anything else."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        raise too_large(name)
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        reason = ", ".join(filter(None, [error.context, error.problem]))
        raise ConfigError(f"{name} is not valid YAML{place}: {reason}", _yaml_hint(reason)) from None
    except yaml.YAMLError:
        raise ConfigError(f"{name} is not text: it has control characters", "Give a YAML file.") from None
    except RecursionError:
        raise _too_deep(name) from None
    return YamlTree(None) if node is None else _Builder(name).build(node)


def too_large(name: str) -> ConfigError:
    """The error for a text of more than MAX_TEXT_BYTES, to raise before reading it all."""
    return ConfigError(
        f"{name} is larger than {MAX_TEXT_BYTES // 1024} KiB", "A config has a few dozen lines. Is this the file?"
    )


def _yaml_hint(reason: str) -> str:
    if "\\t" in reason:
        return "Indent with spaces; YAML takes no tabs."
    if "single document" in reason:
        return "Keep one document; remove the `---` that starts the second."
    return "Check the indentation, the quotes and the space after each colon near there."


def _too_deep(name: str) -> ConfigError:
    return ConfigError(f"{name} is nested more than {MAX_DEPTH} levels deep", "A config needs five.")


class _Builder:
    """Turns nodes into fresh values, counting them, so that aliases cost what they expand to."""

    def __init__(self, name: str):
        self.name = name
        self.num_nodes = 0
        self.lines: dict[str, int] = {}
        self.constructor = yaml.constructor.SafeConstructor()

    def build(self, node: yaml.Node) -> YamlTree:
        return YamlTree(self._value(node, ()), self.lines)

    def _value(self, node: yaml.Node, location: tuple[Any, ...]) -> Any:
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            raise ConfigError(
                f"{self.name} has more than {MAX_NODES} values once its aliases are expanded", "Write it out plainly."
            )
        if len(location) > MAX_DEPTH:
            raise _too_deep(self.name)
        self.lines.setdefault(join_path(location), node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_PREFIX}map":
            return self._mapping(node, location)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_PREFIX}seq":
            return [self._value(item, (*location, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, location)
        raise self._unsupported(node, location)

    def _mapping(self, node: yaml.MappingNode, location: tuple[Any, ...]) -> dict[Any, Any]:
        merged: dict[Any, Any] = {}
        own: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_PREFIX}merge":
                merged = {**self._merged(value_node, location), **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(
                    f"`{join_path(location)}` has a key that is a mapping or a list (line "
                    f"{key_node.start_mark.line + 1} of {self.name})",
                    "Keys are plain words.",
                )
            key = self._scalar(key_node, location)
            if key in own:
                raise ConfigError(
                    f"`{join_path((*location, key))}` is given twice, again at line {key_node.start_mark.line + 1} "
                    f"of {self.name}",
                    "Keep one of them.",
                )
            self.lines.setdefault(join_path((*location, key)), key_node.start_mark.line + 1)
            own[key] = self._value(value_node, (*location, key))
        return {**merged, **own}

    def _merged(self, node: yaml.Node, location: tuple[Any, ...]) -> dict[Any, Any]:
        """What `<<:` brings in; the first of several mappings wins, as YAML has it."""
        values = self._value(node, (*location, "<<"))
        merged: dict[Any, Any] = {}
        for value in reversed(values if isinstance(values, list) else [values]):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"`{join_path((*location, '<<'))}` must be a mapping, got {shown(value)}",
                    "Merge keys name an anchored mapping, for example `<<: *common`.",
                )
            merged.update(value)
        return merged

    def _scalar(self, node: yaml.ScalarNode, location: tuple[Any, ...]) -> Any:
        kind = node.tag.removeprefix(_PREFIX)
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return self.constructor.construct_yaml_bool(node)
            if kind == "int":
                return int(node.value.replace("_", ""))
            if kind == "float":
                return float(node.value.replace("_", ""))
        except (ValueError, KeyError):
            raise ConfigError(
                f"`{join_path(location)}` is not {kind}, got {shown(node.value)} (line {node.start_mark.line + 1} "
                f"of {self.name})",
                "Remove the `!!` tag.",
            ) from None
        if kind in ("str", "merge"):
            return node.value
        raise self._unsupported(node, location)

    def _unsupported(self, node: yaml.Node, location: tuple[Any, ...]) -> ConfigError:
        return ConfigError(
            f"`{join_path(location)}` has the YAML tag {shown(node.tag)} (line {node.start_mark.line + 1} of "
            f"{self.name}), and a config takes none",
            "Remove the tag.",
        )
