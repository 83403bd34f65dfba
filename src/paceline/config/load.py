"""From files, presets, models, environment and command line to one `Config` that knows where each value is from.

The only home of precedence: command line > environment > file > preset > default. Knows no bounds and no Truss names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from paceline.config.options import section_of
from paceline.config.problems import Problem, config_error, join_path, problems_of, shown, unknown_option
from paceline.config.schema import Config
from paceline.config.truss import Note, is_truss, translate_truss
from paceline.config.yaml_text import MAX_TEXT_BYTES, YamlTree, parse_yaml, too_large
from paceline.errors import ConfigError

PRESET_PREFIX = "preset:"
ENVIRONMENT_PREFIX = "PACELINE_"
TRUSS_CONFIG = "config.yaml"  # the file that makes a directory a Truss
NOT_OPTIONS = ("PACELINE_API_KEY",)  # read by the server: a secret is no option of an engine

OriginKind = Literal["default", "preset", "file", "environment", "command line"]
Location = tuple[str, ...]


@dataclass(frozen=True)
class Origin:
    """Where a value is from. `place` is a file and line, a variable or an argument; `spelled` is the option's name
    there, where that is not ours."""

    kind: OriginKind
    place: str | None = None
    spelled: str | None = None

    def __str__(self) -> str:
        spelled = "" if self.spelled is None else f" `{self.spelled}`"
        return self.kind if self.place is None else f"{self.kind} {self.place}{spelled}"


DEFAULT = Origin("default")


@dataclass(frozen=True)
class LoadedConfig:
    """A valid config. `origins` has an entry for every path that is not a default; `notes` is what to tell the user."""

    config: Config
    origins: Mapping[str, Origin]
    notes: tuple[Note, ...] = ()
    name: str = "config"

    def origin(self, path: str) -> Origin:
        """Where the value at a dotted path is from. A model reference is from where its `repo` is from."""
        return _nearest_origin(self.origins, path)


@dataclass(frozen=True)
class Override:
    """One option set from outside the file: its dotted path, its value as text, and what to call it in messages."""

    path: str
    text: str
    spelled: str

    def __str__(self) -> str:
        return f"{self.path}={self.text}"


@dataclass
class _Layer:
    """One source's values in our form. `replaces` says that its model references replace lower ones whole."""

    tree: dict[Any, Any]
    origins: dict[str, Origin] = field(default_factory=dict)
    replaces: bool = True


def preset_names() -> list[str]:
    """The bundled presets, sorted."""
    folder = resources.files("paceline.config") / "presets"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def preset_text(name: str) -> str:
    """The YAML of a bundled preset. Raises ConfigError, naming those there are."""
    if name not in preset_names():
        raise ConfigError(
            f"`preset` must be one of {', '.join(f'`{known}`' for known in preset_names())}, got {shown(name)}",
            "`paceline presets` lists them with what each is for.",
        )
    return (resources.files("paceline.config") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")


def preset_summary(name: str) -> str:
    """What a bundled preset is for: the comment it begins with, else the name of its model."""
    text = preset_text(name)
    comment = [line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), text.splitlines())]
    return " ".join(comment) or parse_config(text, name, kind="preset").config.served_model_name or name


def load_config(
    source: str | os.PathLike[str],
    overrides: Sequence[Override | str] = (),
    environ: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Load what `source` names, under `overrides` ("build.max_batch_size=8") and environment variables
    (`PACELINE_BUILD__MAX_BATCH_SIZE`; `environ` defaults to the process's).

    `source` is a YAML file or a directory with a config.yaml, a preset (`preset:NAME`, or its name alone), or just a
    model: a hub id, a directory, a .gguf file or `package:NAME`, for which everything else is a default.

    Raises ConfigError with every problem found, each with its path, the value, the bound and what to do.
    """
    environ = os.environ if environ is None else environ
    name = os.fspath(source)
    path = os.path.expanduser(name)
    if name.startswith(PRESET_PREFIX):
        return parse_config(preset_text(name.removeprefix(PRESET_PREFIX)), name, overrides, environ, kind="preset")
    if name in preset_names() and not os.path.exists(path):
        return parse_config(preset_text(name), PRESET_PREFIX + name, overrides, environ, kind="preset")
    truss = os.path.join(path, TRUSS_CONFIG)
    if os.path.isfile(truss) and not os.path.exists(os.path.join(path, "config.json")):
        path = truss
    elif _is_model(name, path):
        return _resolved([], name, [Override("model", name, "MODEL"), *overrides], environ, [], [])
    return parse_config(_read(Path(path)), path, overrides, environ)


def _is_model(name: str, path: str) -> bool:
    """Whether a name is a model's and not a config file's. Whether there is such a model is found out on opening it."""
    suffix = os.path.splitext(path)[1].lower()
    if name.startswith("package:") or suffix == ".gguf" or os.path.isdir(path):
        return True
    is_config = os.path.exists(path) or suffix in (".yaml", ".yml", ".json")
    return not is_config and re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII) is not None


def parse_config(
    text: str,
    name: str = "config.yaml",
    overrides: Sequence[Override | str] = (),
    environ: Mapping[str, str] | None = None,
    kind: OriginKind = "file",
) -> LoadedConfig:
    """Like `load_config`, for text already read. `name` is what to call it; `environ` defaults to no variables."""
    problems: list[Problem] = []
    notes: list[Note] = []
    layers = _file_layers(text, name, kind, problems, notes)
    return _resolved(layers, name, overrides, environ or {}, problems, notes)


def override_runtime(
    config: Mapping[str, Any], overrides: Sequence[Override | str], environ: Mapping[str, str] | None = None
) -> Config:
    """The config of a built engine (as JSON has it) under overrides of what may change per start: `runtime.*` and
    `served_model_name`. Environment variables of other options are left to builds; overrides of them raise ConfigError,
    as does anything wrong with a value."""
    environ = os.environ if environ is None else environ
    layers = [_Layer(dict(config), replaces=False)]
    runtime = {name: text for name, text in environ.items() if name.startswith(f"{ENVIRONMENT_PREFIX}RUNTIME__")}
    for override in overrides:
        path = str(override).partition("=")[0].strip()
        if not path.startswith("runtime.") and path not in ("runtime", "served_model_name", "model_name"):
            raise ConfigError(
                f"`{path}` is fixed when an engine is built, and this one is built already",
                "Name the model or config instead of the engine folder: it is built with that, beside this one.",
            )
    return _resolved(layers, "the engine's config", overrides, runtime, [], []).config


def _resolved(
    layers: list[_Layer],
    name: str,
    overrides: Sequence[Override | str],
    environ: Mapping[str, str],
    problems: list[Problem],
    notes: list[Note],
) -> LoadedConfig:
    """The config of some layers, under the environment's and the command line's."""
    layers = [*layers, _environment_layer(environ, problems), _command_line_layer(overrides, problems)]
    tree, origins = _merge(layers)
    config = _validate(tree, origins, problems)
    if problems or config is None:
        raise config_error(problems, name)
    return LoadedConfig(config, origins, tuple(notes), name)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist",
            "Give a model (OWNER/NAME on the hub, a directory, a .gguf file, package:NAME), a YAML file, or a preset: "
            f"{', '.join(preset_names())}.",
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{shown(str(path))} cannot be read: {reason}", "Check the path and its rights.") from None
    if len(content) > MAX_TEXT_BYTES:
        raise too_large(str(path))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x})", "Give a YAML file."
        ) from None


def _file_layers(text: str, name: str, kind: OriginKind, problems: list[Problem], notes: list[Note]) -> list[_Layer]:
    """The layers of one file: the preset it names, if any, then itself."""
    parsed = parse_yaml(text, name)
    if parsed.value is None:
        raise ConfigError(f"{name} is empty", "The shortest config is one line: `model: Qwen/Qwen3-8B`.")
    if not isinstance(parsed.value, dict):
        raise ConfigError(f"{name} must be a mapping, got {shown(parsed.value)}", "Write `key: value` lines.")
    if is_truss(parsed.value):
        return [_truss_layer(parsed, name, kind, problems, notes)]
    tree = dict(parsed.value)
    below: list[_Layer] = []
    if kind == "file" and "preset" in tree:
        preset = tree.pop("preset")
        if not isinstance(preset, str):
            raise ConfigError(f"`preset` must be a name, got {shown(preset)}", f"One of {', '.join(preset_names())}.")
        preset = preset.removeprefix(PRESET_PREFIX)
        below = _file_layers(preset_text(preset), f"{PRESET_PREFIX}{preset}", "preset", problems, notes)
    origins = {path: Origin(kind, _place(name, parsed, path)) for path in map(join_path, _leaves(tree))}
    if "model_name" in tree and "served_model_name" not in tree:
        tree["served_model_name"] = tree.pop("model_name")
        origins["served_model_name"] = replace(origins.pop("model_name", DEFAULT), kind=kind, spelled="model_name")
    return [*below, _Layer(tree, origins)]


def _truss_layer(parsed: YamlTree, name: str, kind: OriginKind, problems: list[Problem], notes: list[Note]) -> _Layer:
    translation = translate_truss(parsed.value, lambda path: _place(name, parsed, path))
    if translation.problems:
        raise config_error(translation.problems, name)
    notes.extend(translation.notes)
    origins = {
        path: Origin(kind, _place(name, parsed, spelled), spelled) for path, spelled in translation.spelled.items()
    }
    return _Layer(translation.tree, origins)


def _place(name: str, parsed: YamlTree, path: str) -> str:
    """The `FILE:LINE` of a path, or of the nearest section around it that was written."""
    while path and path not in parsed.lines:
        path = path.rpartition(".")[0]
    line = parsed.lines.get(path) if path else None
    return name if line is None else f"{name}:{line}"


def _environment_layer(environ: Mapping[str, str], problems: list[Problem]) -> _Layer:
    """`PACELINE_BUILD__MAX_BATCH_SIZE=8`. A variable set to nothing counts as unset, as shells have it."""
    layer = _Layer({}, replaces=False)
    for variable in sorted(environ):
        if variable.startswith(ENVIRONMENT_PREFIX) and environ[variable] != "" and variable not in NOT_OPTIONS:
            path = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            _override(layer, path, environ[variable], Origin("environment", variable), problems)
    return layer


def _command_line_layer(overrides: Sequence[Override | str], problems: list[Problem]) -> _Layer:
    layer = _Layer({}, replaces=False)
    for override in overrides:
        if isinstance(override, Override):
            origin = Origin("command line", override.spelled)
            _override(layer, override.path, override.text, origin, problems)
            continue
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            message = f"is not of the form KEY=VALUE, got {shown(override)}"
            problems.append(Problem("--set", message, "For example `--set build.max_batch_size=8`."))
            continue
        _override(layer, path.strip(), text, Origin("command line", f"--set {path.strip()}"), problems)
    return layer


def _override(layer: _Layer, path: str, text: str, origin: Origin, problems: list[Problem]) -> None:
    """Set one dotted path of a layer from text. A section may be given whole, as a YAML mapping in braces."""
    path = "served_model_name" if path == "model_name" else path
    location = tuple(path.split("."))
    if location not in _KNOWN_PATHS:
        problems.append(unknown_option(location, Config, str(origin)))
        return
    try:
        value = _override_value(location, text)
    except ConfigError as error:
        problems.append(Problem(path, f"has a value that is no YAML, got {shown(text)}", error.hint or "", str(origin)))
        return
    _insert(layer.tree, location, value)
    layer.origins.update((join_path(leaf), origin) for leaf in _leaves(value, location))


def _override_value(location: Location, text: str) -> Any:
    """YAML, except that a text option takes its text as it is (`1e10` is a revision, `@x` a name)."""
    if location not in _TEXT_PATHS:
        return parse_yaml(text, "the value").value
    return parse_yaml(text, "the value").value if text.lstrip().startswith("{") else text


def _section_paths() -> Iterator[Location]:
    """Every path that can be overridden: the options, the sections, and what model references hold."""
    pending: list[tuple[Location, Any]] = [((), Config)]
    while pending:
        above, model = pending.pop()
        for name, info in model.model_fields.items():
            yield (*above, name)
            section = section_of(info)
            if section is not None:
                pending.append(((*above, name), section))


_KNOWN_PATHS = frozenset(_section_paths())
_REFERENCE_PATHS = (("model",), ("speculation", "draft"))
_TEXT_PATHS = frozenset(
    [("served_model_name",), *_REFERENCE_PATHS]
    + [(*reference, name) for reference in _REFERENCE_PATHS for name in ("repo", "revision")]
)


def _insert(tree: dict[Any, Any], location: Location, value: Any) -> None:
    *sections, name = location
    for index, section in enumerate(sections):
        here = tree.get(section)
        tree[section] = here if isinstance(here, dict) else _expanded(tuple(sections[: index + 1]), here)
        tree = tree[section]
    tree[name] = value


def _expanded(location: Location, value: Any) -> dict[Any, Any]:
    """A section given in short (`model: a/b`, `speculation: off`) as the mapping it stands for."""
    if not isinstance(value, str):
        return {}
    return {"repo" if location in _REFERENCE_PATHS else "method": value}


def _leaves(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if not isinstance(tree, dict) or not tree:
        yield above
        return
    for key, value in tree.items():
        yield from _leaves(value, (*above, key))


def _merge(layers: Sequence[_Layer]) -> tuple[dict[Any, Any], dict[str, Origin]]:
    """Lay each layer over those before it. A mapping merges into a mapping; anything else replaces what was there."""
    merged: dict[Any, Any] = {}
    for layer in layers:
        _overlay(merged, layer.tree, (), layer.replaces)
    # A leaf that survived is the topmost layer's that has it: whatever replaced it further down did not bring it back.
    written: dict[str, Origin] = {}
    for layer in layers:
        written.update(layer.origins)
    return merged, {path: _nearest_origin(written, path) for path in map(join_path, _leaves(merged))}


def _overlay(base: dict[Any, Any], top: Mapping[Any, Any], above: tuple[Any, ...], replaces: bool) -> None:
    for key, value in top.items():
        location = (*above, key)
        if not isinstance(value, dict) or (replaces and location in _REFERENCE_PATHS):
            base[key] = value
            continue
        here = base.get(key)
        base[key] = dict(here) if isinstance(here, dict) else _expanded(location, here)
        _overlay(base[key], value, location, replaces)


def _validate(tree: dict[Any, Any], origins: Mapping[str, Origin], problems: list[Problem]) -> Config | None:
    """The config of a merged tree, or None after adding to `problems`, each placed and spelled as the user wrote it."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        for problem in problems_of(error, Config):
            origin = _nearest_origin(origins, problem.path)
            path = origin.spelled or problem.path
            problems.append(Problem(path, problem.message, problem.hint, origin.place))
        return None


def _nearest_origin(origins: Mapping[str, Origin], path: str) -> Origin:
    while path:
        for candidate in (path, f"{path}.repo"):
            if candidate in origins:
                return origins[candidate]
        path = path.rpartition(".")[0]
    return DEFAULT
