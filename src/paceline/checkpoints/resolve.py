"""What a model reference means: an installed package, a .gguf file, a directory, or a hub id.

Knows the order in which they are tried. Knows nothing of what is inside them.
"""

from __future__ import annotations

import re
from pathlib import Path

from paceline.checkpoints.checkpoint import Checkpoint
from paceline.checkpoints.gguf import open_gguf
from paceline.checkpoints.hub import Progress, download
from paceline.checkpoints.local import open_directory
from paceline.checkpoints.package import PREFIX, open_package
from paceline.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def open_checkpoint(
    reference: str, revision: str | None = None, progress: Progress | None = None, offline: bool = False
) -> Checkpoint:
    """Open what `reference` names; nothing but headers is read, and only a hub id downloads.

    `package:NAME` is an installed Python package; an existing path is a .gguf file or a directory; `OWNER/NAME` is a
    Hugging Face hub id. `revision` is a hub branch, tag or commit and is refused for anything else. `progress` is told
    about downloads; with `offline` there are none. Raises CheckpointError, which lists what was tried.
    """
    path = Path(reference).expanduser()
    is_package, is_local = reference.startswith(PREFIX), path.exists()
    if revision is not None and (is_package or is_local):
        kind = "an installed package" if is_package else "a local path"
        raise CheckpointError(
            f"`revision`: {revision!r} was given for `{reference}`, which is {kind}", "Only hub ids have revisions."
        )
    if is_package:
        return open_package(reference.removeprefix(PREFIX))
    if path.is_file():
        return open_gguf(path)
    if path.is_dir():
        return _open_directory(path, None)
    if _HUB_ID.fullmatch(reference) and path.suffix != ".gguf":
        directory, source = download(reference, revision, progress, offline)
        return _open_directory(directory, source)
    raise CheckpointError(
        f"`{reference}` is no checkpoint: there is no such file or directory, and it is not of the form "
        f"`{PREFIX}NAME` or `OWNER/NAME` (a hub id)",
        "Check the spelling; a relative path starts where the command runs.",
    )


def _open_directory(directory: Path, source: str | None) -> Checkpoint:
    """A Hugging Face directory, or one that holds a single .gguf file."""
    files = sorted(directory.glob("*.gguf"))
    if (directory / "config.json").exists() or not files:
        return open_directory(directory, source)
    if len(files) > 1:
        raise CheckpointError(
            f"`{directory}` holds {len(files)} .gguf files: {', '.join(file.name for file in files)}",
            "Name one of them by its path.",
        )
    return open_gguf(files[0], source)
