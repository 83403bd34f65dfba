"""Options that several commands share: the model or config they are about, and what overrides it.

An override is a pair (path of the option, its value as text) with the flag's own name, for messages.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

# Of `config.Override | str`, which importing would make even --help pay for pydantic.
Overrides = list[Any]

DEFAULT_MODEL = "preset:smollm2-135m"  # what is served when nothing is named: small, and from the package registry
ENGINES = Path("engines")

_SOURCES = "A model (hub id, directory, `.gguf` file, `package:NAME`), a config file (YAML), or a preset's name."
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_SOURCES)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, for programs.")]
OutputOption = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="ENGINE", help="Engine folder to write; unset is `engines/NAME`."),
]

_PANEL = "Options of the config"


def _flag(*names: str, help: str, **more: Any) -> Any:
    return Annotated[more.pop("type", str) | None, typer.Option(*names, help=help, rich_help_panel=_PANEL, **more)]


# parameter -> (path of the option it sets, annotation); every other option is reached with --set.
_FLAGS: dict[str, tuple[str, Any]] = {
    "speculation": (
        "speculation.method", _flag("--speculation", metavar="METHOD", help="auto, suffix, draft, hybrid or off.")
    ),
    "draft": ("speculation.draft", _flag("--draft", metavar="MODEL", help="A draft model of the same tokenizer.")),
    "num_draft_tokens": (
        "speculation.num_draft_tokens",
        _flag("--num-draft-tokens", type=int, metavar="N", help="Most tokens drafted per round."),
    ),
    "quantization": ("quantization", _flag("--quantization", metavar="FORMAT", help="auto, int8, bf16 or float32.")),
    "max_seq_len": (
        "max_seq_len",
        _flag("--max-seq-len", "--max-model-len", type=int, metavar="N", help="Most tokens of prompt and output."),
    ),
    "served_model_name": (
        "served_model_name", _flag("--served-model-name", metavar="NAME", help="Name of the model in the API.")
    ),
    "device": ("device", _flag("--device", metavar="DEVICE", help="auto, cpu or cuda.")),
}  # fmt: skip
_SET = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any option, e.g. `build.max_batch_size=8`.", rich_help_panel=_PANEL
    ),
]


def with_overrides(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the flags above; it receives what they say as the list `overrides`."""
    signature = inspect.signature(command, eval_str=True)
    parameters = [parameter for name, parameter in signature.parameters.items() if name != "overrides"]
    for name, (_, annotation) in _FLAGS.items():
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    parameters.append(inspect.Parameter("set_", inspect.Parameter.KEYWORD_ONLY, default=[], annotation=_SET))

    @functools.wraps(command)
    def wrapped(**arguments: Any) -> None:
        from paceline.config import Override

        flags = {name: arguments.pop(name) for name in _FLAGS}
        set_ = arguments.pop("set_")
        overrides: Overrides = [
            Override(_FLAGS[name][0], str(value), f"--{name.replace('_', '-')}")
            for name, value in flags.items()
            if value is not None
        ]
        command(**arguments, overrides=[*overrides, *set_])

    wrapped.__signature__ = signature.replace(parameters=parameters)
    return wrapped


def engine_folder(source: str, overrides: Overrides) -> Path:
    """Where an engine goes that was given no folder: named after its model or config, and, so that none replaces
    another, after what was overridden."""
    name = Path(source).expanduser().resolve().name if Path(source).expanduser().exists() else source
    name = name.removeprefix("preset:").removeprefix("package:").rpartition("/")[2]
    for suffix in (".yaml", ".yml", ".gguf"):
        name = name.removesuffix(suffix)
    built = sorted(text for text in map(str, overrides) if not text.startswith(("runtime.", "served_model_name")))
    if built:
        name += f"-{hashlib.sha256(repr(built).encode()).hexdigest()[:8]}"
    return ENGINES / (name or "engine")
