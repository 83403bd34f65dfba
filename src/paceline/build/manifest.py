"""The engine folder: which files it has, what its manifest says, and how both are checked. The only home of either.

    manifest.json          what was built from what, with which choices, on which machine, at which cost
    target.safetensors     packed weights (build/quantize.py)
    draft.safetensors      the draft model's, where the engine has one
    tokenizer.json, chat_template.jinja

Knows nothing of how an engine is built or run.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from paceline.errors import EngineFolderError
from paceline.model.architecture import Architecture

FORMAT_VERSION = 1
MANIFEST, TOKENIZER, TEMPLATE = "manifest.json", "tokenizer.json", "chat_template.jinja"
TARGET, DRAFT = "target.safetensors", "draft.safetensors"
FILES = frozenset({MANIFEST, TOKENIZER, TEMPLATE, TARGET, DRAFT})

_ARCHITECTURE = TypeAdapter(Architecture)


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelRecord(_Part):
    """One model of the engine. `vocab_size` is the tokenizer's: the checkpoint's padding was cut."""

    source: str
    digest: str
    architecture: dict[str, Any]
    num_parameters: int
    vocab_size: int
    quantization: str
    activation_group: int
    weight_bytes: int
    sha256: str
    # Relative error of each int8 layer's weights; layers above the bound were kept in bf16 and are listed too.
    weight_errors: dict[str, float] = {}
    kept_in_bf16: list[str] = []

    def to_architecture(self) -> Architecture:
        """The architecture as its dataclass. Raises EngineFolderError if the record was edited into nonsense."""
        try:
            return _ARCHITECTURE.validate_python(self.architecture)
        except ValidationError as error:
            raise EngineFolderError(
                f"the manifest's `architecture` is not valid: {error.errors()[0]['msg']}",
                hint="build the engine again.",
            ) from error


class Machine(_Part):
    """The machine the costs were measured on. `fingerprint` covers the CPU's model and instruction sets."""

    fingerprint: str
    cpu: str
    num_cores: int


class Kernels(_Part):
    """Which implementation runs the model ("native" or "torch"), on how many threads, and what else was measured."""

    name: str
    num_threads: int
    compiler: str | None = None
    candidates: list[dict[str, Any]] = []


class Costs(_Part):
    """Seconds of one forward pass by rows, for the target (v(n)) and the draft (d); seconds of prefilling by tokens."""

    context: int
    target: dict[int, float]
    draft: dict[int, float] = {}
    prefill: dict[int, float] = {}


class Choice(_Part):
    """One decision of the builder and the measurement behind it."""

    what: str
    chosen: str
    because: str


class Manifest(_Part):
    format_version: int
    paceline_version: str
    key: str  # digest of the config and the checkpoints: the same key is the same engine
    served_model_name: str
    config: dict[str, Any]
    max_seq_len: int
    eos_token_ids: list[int]
    bos_token_id: int | None
    special_tokens: dict[str, str]
    default_sampling: dict[str, float] = {}
    method: str | None  # None: speculation off
    num_draft_tokens: int
    row_buckets: list[int]
    target: ModelRecord
    draft: ModelRecord | None
    kernels: Kernels
    machine: Machine
    costs: Costs
    choices: list[Choice]
    versions: dict[str, str]
    files: dict[str, str]  # sha256 of the small files


def architecture_record(architecture: Architecture) -> dict[str, Any]:
    """An architecture as JSON-ready values."""
    return json.loads(json.dumps(asdict(architecture)))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json with a digest of itself, whole or not at all."""
    body = manifest.model_dump_json(indent=1)
    text = json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "engine": json.loads(body)}, indent=1)
    write_whole(folder / MANIFEST, text)


def write_whole(path: Path, text: str) -> None:
    """Write a small file whole or not at all, even if the process is killed meanwhile."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_manifest(folder: Path) -> Manifest:
    """Read and check a folder's manifest. Raises EngineFolderError saying what is wrong with the folder."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise EngineFolderError(
            f"there is no engine at `{folder}`", hint="build one: `paceline build CONFIG -o ENGINE`."
        )
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        content = document["engine"]
        version = content["format_version"]
    except FileNotFoundError as error:
        raise EngineFolderError(
            f"`{folder}` is not a finished engine: it has no {MANIFEST}",
            hint="an interrupted build is resumed by running the same `paceline build` again.",
        ) from error
    except KeyError as error:
        raise EngineFolderError(f"`{path}` has no `{error.args[0]}`", hint="build the engine again.") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise EngineFolderError(f"`{path}` cannot be read: {error}", hint="build the engine again.") from error
    if version != FORMAT_VERSION:
        newer = isinstance(version, int) and version > FORMAT_VERSION
        raise EngineFolderError(
            f"`{folder}` has engine format {version}; this Paceline reads format {FORMAT_VERSION}",
            hint="upgrade Paceline." if newer else "build the engine again.",
        )
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise EngineFolderError(
            f"`{path}` is not valid at `{where}`: {first['msg']}", hint="build the engine again."
        ) from error
    if hashlib.sha256(manifest.model_dump_json(indent=1).encode()).hexdigest() != document.get("sha256"):
        raise EngineFolderError(
            f"`{path}` was edited after the build",
            hint="edit the config instead and build again; where only `runtime` options changed, that is instant.",
        )
    return manifest


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raise EngineFolderError unless every file is as the manifest says; of weights only the size is looked at."""
    for name in manifest.files:
        read_small_file(folder, name, manifest)
    for name, record in ((TARGET, manifest.target), (DRAFT, manifest.draft)):
        if record is None:
            continue
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise EngineFolderError(
                f"`{folder / name}` cannot be read: {error.strerror}", hint="build the engine again."
            ) from error
        if size != record.weight_bytes:
            raise EngineFolderError(
                f"`{folder / name}` has {size} bytes instead of {record.weight_bytes}", hint="build the engine again."
            )


def read_small_file(folder: Path, name: str, manifest: Manifest) -> str | None:
    """The text of the tokenizer or template, checked; None if the engine has no such file."""
    if name not in manifest.files:
        return None
    try:
        content = (folder / name).read_bytes()
    except OSError as error:
        raise EngineFolderError(
            f"`{folder / name}` cannot be read: {error.strerror}", hint="build the engine again."
        ) from error
    if hashlib.sha256(content).hexdigest() != manifest.files[name]:
        raise EngineFolderError(f"`{folder / name}` was changed after the build", hint="build the engine again.")
    return content.decode("utf-8")
