"""The .safetensors files of a directory as lazily read tensors.

Knows single and sharded layouts and what makes a file unusable. Knows nothing of tensor names or architectures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import safetensors
import torch

from paceline.checkpoints.checkpoint import SAMPLE_BYTES, TensorEntry
from paceline.checkpoints.json_files import read_json
from paceline.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FLOAT_TYPES = ("F32", "F16", "BF16")
_GIT_LFS_MAGIC = b"version https://git-lfs"


def read_safetensors(directory: Path, rename: Callable[[str], str | None]) -> dict[str, TensorEntry]:
    """Entries of every tensor in `directory`, under the name `rename` gives it (None: leave it out).

    Reads headers only. Raises CheckpointError for a missing shard, a damaged header, sizes that do not add up, an index
    that points elsewhere, and element types other than float32, float16 and bfloat16.
    """
    index_path = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file():
        shards, indexed = [SINGLE_FILE], {}
    elif index_path.is_file():
        indexed = _read_index(index_path)
        shards = sorted(set(indexed.values()))
    else:
        raise _no_weights(directory)
    missing = [shard for shard in shards if not (directory / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"`{directory}` lacks {len(missing)} of {len(shards)} weight files, the first is `{missing[0]}`",
            "The download is incomplete: download the checkpoint again.",
        )
    entries: dict[str, TensorEntry] = {}
    stored: set[str] = set()
    for shard in shards:
        for stored_name, entry in _read_header(directory / shard, rename).items():
            stored.add(stored_name)
            name = rename(stored_name)
            if name is not None and indexed.get(stored_name, shard) == shard:
                entries[name] = entry
    absent = sorted(name for name in indexed if rename(name) is not None and name not in stored)
    if absent:
        raise CheckpointError(
            f"`{directory / indexed[absent[0]]}` lacks tensor `{absent[0]}`, which `{INDEX_FILE}` says it holds",
            "The files belong to different versions: download the checkpoint again.",
        )
    return entries


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"`{path}`: `weight_map` is missing or empty", "Download the checkpoint again.")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"`{path}`: `weight_map.{name}` is {shard!r}, not the name of a .safetensors file beside it",
                "The index is damaged or hostile; do not use this checkpoint.",
            )
    return weight_map


def _read_header(path: Path, rename: Callable[[str], str | None]) -> dict[str, TensorEntry]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dictionary)
            described = {name: (piece.get_dtype(), tuple(piece.get_shape())) for name, piece in slices.items()}
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        with path.open("rb") as file:
            is_pointer = file.read(len(_GIT_LFS_MAGIC)) == _GIT_LFS_MAGIC
        problem = "is a Git LFS pointer, not the weights" if is_pointer else f"is truncated or corrupt ({error})"
        hint = "Run `git lfs pull` in its directory." if is_pointer else "Download this file again."
        raise CheckpointError(f"`{path}` {problem}", hint) from error
    for name, (encoding, _) in described.items():
        if encoding not in _FLOAT_TYPES and rename(name) is not None:
            raise CheckpointError(
                f"`{path}`: tensor `{name}` is stored as {encoding}; supported: {', '.join(_FLOAT_TYPES)}",
                "The checkpoint is quantised: use the original one, or a GGUF file.",
            )
    return {
        name: TensorEntry(shape, encoding, _Reader(path, name), _Sampler(path, name))
        for name, (encoding, shape) in described.items()
    }


class _Reader:
    """Reads one tensor. Opens the file each time, so that its mapping is released with the tensor."""

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name

    def __call__(self) -> torch.Tensor:
        try:
            with safetensors.safe_open(self.path, framework="pt") as file:
                return file.get_tensor(self.name)
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"`{self.path}`: tensor `{self.name}` cannot be read ({error})", "Did the file change? Try again."
            ) from error


class _Sampler(_Reader):
    """Reads the first bytes of the middle row of one tensor."""

    def __call__(self) -> bytes:
        with safetensors.safe_open(self.path, framework="pt") as file:
            piece = file.get_slice(self.name)
            middle = piece.get_shape()[0] // 2 if piece.get_shape() else 0
            row = piece[middle : middle + 1] if len(piece.get_shape()) > 1 else file.get_tensor(self.name)
        return row.contiguous().reshape(-1).view(torch.uint8)[:SAMPLE_BYTES].numpy().tobytes()


def _no_weights(directory: Path) -> CheckpointError:
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickles:
        return CheckpointError(
            f"`{directory}` holds only pickled weights (`{pickles[0]}`); loading them could run any code",
            "Convert them where you trust them: `AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)` "
            "writes safetensors.",
        )
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    found = f"; it holds `{others[0]}`, which is not a Hugging Face layout" if others else ""
    return CheckpointError(
        f"`{directory}` holds neither `{SINGLE_FILE}` nor `{INDEX_FILE}`{found}",
        "Name a directory written by `save_pretrained`, or a .gguf file.",
    )
