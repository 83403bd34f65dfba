"""Reading a JSON object from a file that may be absent, damaged or hostile. Knows no file's meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises CheckpointError when it cannot be read or is not an object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"`{path}` cannot be read as JSON ({error})", "Download this file again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"`{path}` holds {type(content).__name__}, expected an object", "Download it again.")
    return content


def read_json_if_present(path: Path) -> dict[str, Any]:
    """As read_json, and {} where there is no such file."""
    return read_json(path) if path.is_file() else {}
