"""Reading and writing tensors as safetensors, one at a time, aligned for the kernels.

Knows the safetensors format (https://huggingface.co/docs/safetensors); knows nothing of what the tensors mean. The
library's own writer wants every tensor in memory at once and aligns nothing; any safetensors reader opens these files.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterable
from pathlib import Path

import torch

from paceline.errors import EngineFolderError

ALIGNMENT = 64  # bytes: one cache line, one vector register
_NAMES = {torch.uint8: "U8", torch.bfloat16: "BF16", torch.float32: "F32"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
HEADER_BYTES = 1 << 20  # room for some 8000 tensors


def write_tensors(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Write (name, tensor) pairs as they come and return the file's sha256. Raises OSError when the disk is full.

    The header comes before the data but knows its end: its room is reserved first and filled last, with spaces behind
    it, as the format allows.
    """
    entries: dict[str, dict] = {}
    with path.open("wb") as file:
        file.seek(HEADER_BYTES)
        for name, tensor in tensors:
            start = file.tell() - HEADER_BYTES
            tensor = tensor.detach().contiguous()
            file.write(memoryview(tensor.view(-1).view(torch.uint8).numpy()))
            end = file.tell() - HEADER_BYTES
            entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
            # The format allows no gaps between tensors: a tensor of its own fills what alignment leaves.
            if gap := -end % ALIGNMENT:
                file.write(bytes(gap))
                entries[f"_pad.{end}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [end, end + gap]}
        header = json.dumps(entries).encode()
        if len(header) + 8 > HEADER_BYTES:
            raise ValueError(f"{len(entries)} tensors do not fit into a header of {HEADER_BYTES} bytes")
        file.seek(0)
        file.write((HEADER_BYTES - 8).to_bytes(8, "little") + header.ljust(HEADER_BYTES - 8))
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while piece := file.read(1 << 22):
            digest.update(piece)
        return digest.hexdigest()


def read_tensors(path: Path, expected_sha256: str | None = None) -> dict[str, torch.Tensor]:
    """Read a whole file into one block of memory backed by huge pages (fewer TLB misses while weights stream by).

    Raises EngineFolderError if the file is missing, truncated, malformed, or does not hash to `expected_sha256`.
    """
    try:
        size = path.stat().st_size
        arena = mmap.mmap(-1, max(size, 1) + (2 << 20))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            arena.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(arena)
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            position = 0
            while position < size and (count := file.readinto(view[position : min(size, position + (16 << 20))])):
                if expected_sha256:
                    digest.update(view[position : position + count])
                position += count
    except OSError as error:
        raise EngineFolderError(f"cannot read `{path}`: {error.strerror}", hint="build the engine again.") from error
    if position != size or (expected_sha256 and digest.hexdigest() != expected_sha256):
        raise EngineFolderError(
            f"`{path}` is not the file the builder wrote: its contents changed",
            hint="remove the engine's folder and build it again.",
        )
    try:
        length = int.from_bytes(view[:8], "little")
        if length > size - 8:
            raise ValueError("header longer than the file")
        entries = json.loads(bytes(view[8 : 8 + length]))
        return {
            name: _tensor(arena, 8 + length, size, entry)
            for name, entry in entries.items()
            if not name.startswith(("_pad.", "__metadata__"))
        }
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise EngineFolderError(
            f"`{path}` is not a valid tensor file: {error}", hint="remove the engine's folder and build it again."
        ) from error


def _tensor(arena: mmap.mmap, base: int, size: int, entry: dict) -> torch.Tensor:
    start, end = entry["data_offsets"]
    dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
    if not 0 <= start <= end <= size - base or (end - start) != torch.Size(shape).numel() * dtype.itemsize:
        raise ValueError("a tensor lies outside the file")
    if start == end:
        return torch.empty(shape, dtype=dtype)
    if (base + start) % ALIGNMENT:
        raise ValueError(f"a tensor does not start at a multiple of {ALIGNMENT} bytes")
    return torch.frombuffer(arena, dtype=dtype, count=(end - start) // dtype.itemsize, offset=base + start).view(shape)
