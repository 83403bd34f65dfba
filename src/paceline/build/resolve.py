"""From a config to everything that follows from it and from its checkpoints' headers.

Whatever a build can be refused for is found here, before work starts: no weights are read. Knows checkpoints and the
machine's memory; knows nothing of engine folders.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

import paceline
from paceline.build.compatibility import check_draft, check_shapes, model_warnings
from paceline.build.manifest import FORMAT_VERSION
from paceline.checkpoints.checkpoint import Checkpoint
from paceline.checkpoints.resolve import open_checkpoint
from paceline.config.schema import Config, ModelReference
from paceline.errors import ConfigError, DeviceError

_WEIGHT_BYTES = {"int8": 1, "bf16": 2, "float32": 4}


@dataclass(frozen=True)
class Listener:
    """Who hears of a build: `stage(name, done, total)` for progress bars, `say(text)` for notices and warnings."""

    stage: Callable[[str, int, int], None] = lambda name, done, total: None
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Resolved:
    """A config with its checkpoints opened (headers only) and everything that follows from them."""

    config: Config
    target: Checkpoint
    draft: Checkpoint | None
    device: str
    quantization: str
    draft_quantization: str
    max_seq_len: int
    method: str | None
    warnings: tuple[str, ...]

    @property
    def served_model_name(self) -> str:
        """The name asked for, or the model's own: a path's last part, as nobody types paths into a request."""
        repo = self.config.model.repo
        own = Path(repo).resolve().name.removesuffix(".gguf") if os.path.exists(repo) else repo.removeprefix("package:")
        return self.config.served_model_name or own

    @property
    def key(self) -> str:
        """Digest of everything the engine's content depends on: neither the machine nor what may change per start."""
        config = self.config.model_dump(mode="json", exclude={"runtime", "served_model_name"})
        parts = [FORMAT_VERSION, paceline.__version__, config, self.device]
        parts += [c.digest if c else None for c in (self.target, self.draft)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def weight_bytes(self) -> int:
        """About how much the engine's weights take, in memory and on disk."""
        total = _model_bytes(self.target, self.quantization)
        return total + (_model_bytes(self.draft, self.draft_quantization) if self.draft else 0)


def _model_bytes(checkpoint: Checkpoint, quantization: str) -> int:
    return checkpoint.num_parameters * _WEIGHT_BYTES[quantization]


def resolve(config: Config, listener: Listener, offline: bool = False) -> Resolved:
    """Open the checkpoints and settle what depends on them. Raises before any weight is read. With `offline` nothing is
    downloaded: what is not on this machine raises HubUnreachableError."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            "`device` is cuda, but PyTorch sees no NVIDIA GPU here",
            hint="use `device: cpu`, or install a CUDA build of PyTorch on a machine with a GPU.",
        )
    default = "int8" if device == "cpu" else "bf16"
    quantization = default if config.quantization == "auto" else config.quantization
    if device == "cuda" and quantization == "int8":
        raise ConfigError(
            "`quantization` int8 runs on CPUs only, and `device` is cuda", hint="use `quantization: bf16`."
        )
    options = config.speculation
    method = options.method if options.method != "auto" else ("hybrid" if options.draft else "suffix")
    target = _open(config.model, "target", listener, offline)
    with_draft = options.draft is not None and method in ("draft", "hybrid")
    draft = _open(options.draft, "draft", listener, offline) if with_draft else None
    limit = target.architecture.max_position_embeddings
    if config.max_seq_len is not None and config.max_seq_len > limit:
        raise ConfigError(
            f"`max_seq_len` must be at most {limit}, the length `{target.source}` was made for, "
            f"got {config.max_seq_len}",
            hint="lower it, or leave it out to use the model's own.",
        )
    warnings = model_warnings(target, draft)
    check_shapes(target)
    if draft is not None:
        check_shapes(draft)
        check_draft(target, draft)
    build = config.build
    resolved = Resolved(
        config, target, draft, device, quantization,
        quantization if build.draft_quantization == "auto" else build.draft_quantization,
        config.max_seq_len or limit, None if method == "off" else method, tuple(warnings),
    )  # fmt: skip
    return _with_memory_warnings(resolved)


def _open(reference: ModelReference, role: str, listener: Listener, offline: bool) -> Checkpoint:
    progress = lambda done, total: listener.stage(f"download {role}", done, total)  # noqa: E731
    return open_checkpoint(reference.repo, reference.revision, progress, offline)


def _with_memory_warnings(resolved: Resolved) -> Resolved:
    free = psutil.virtual_memory().available
    if resolved.device == "cpu" and resolved.weight_bytes > free:
        text = (
            f"the weights take about {resolved.weight_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB of memory are free: "
            "this engine will not fit on this machine."
        )
        return dataclasses.replace(resolved, warnings=(*resolved.warnings, text))
    return resolved
