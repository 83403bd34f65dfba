"""Builds tiny engines for tests, once per distinct config. Knows the builder; knows nothing of what is tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.build.builder import build_engine
from paceline.build.manifest import Manifest
from paceline.build.resolve import Listener
from paceline.config import Config


def config_of(model: Path | str, **options: Any) -> Config:
    """A config that builds fast: nothing is measured that need not be, one thread."""
    build = {"autotune": False, "num_threads": 1, "max_batch_size": 4, "max_num_tokens": 64} | options.pop("build", {})
    defaults = {"speculation": "suffix", "runtime": {"kv_cache_bytes": 4 << 20}}
    return Config.model_validate({"model": str(model), "build": build} | defaults | options)


def build_tiny(model: Path | str, output: Path, listener: Listener | None = None, **options: Any) -> Manifest:
    """Build an engine of the checkpoint at `model` into `output`."""
    return build_engine(config_of(model, **options), output, listener)


class Recorder:
    """A listener that keeps what it heard and can stop the build at a stage, as Ctrl-C would."""

    def __init__(self, stop_at: tuple[str, int] | None = None):
        self.stages: list[tuple[str, int]] = []
        self.said: list[str] = []
        self._stop_at = stop_at

    @property
    def listener(self) -> Listener:
        return Listener(self._stage, self.said.append)

    def names(self) -> set[str]:
        return {name for name, _ in self.stages}

    def _stage(self, name: str, done: int, total: int) -> None:
        self.stages.append((name, done))
        if (name, done) == self._stop_at:
            raise KeyboardInterrupt
