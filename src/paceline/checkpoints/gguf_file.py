"""The GGUF container: metadata and tensors of one file, parsed and bounds-checked before anything is trusted.

Knows the byte layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) and takes encodings and dequantisation
from the `gguf` package. That package's own reader is not used: it needs 9 s for a vocabulary of 150 000 tokens, and
never ends on a hostile array length. Knows nothing of what keys or tensors mean.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType

from paceline.errors import CheckpointError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
_PLAIN_TYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the file. `shape` is row-major (outermost first), as PyTorch has it."""

    name: str
    shape: tuple[int, ...]
    encoding: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GgufFile:
    """An opened file: `metadata` by key, `tensors` by name. Reads the header at once, tensors on demand."""

    def __init__(self, path: Path):
        """Raises CheckpointError for anything that is not a whole, well-formed file of a supported version."""
        self.path = path
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                self.metadata, self.tensors = _parse(content)
        except _Malformed as error:
            raise CheckpointError(f"`{path}` {error}", "Download this file again, or convert it again.") from error
        except (OSError, ValueError) as error:  # mmap raises ValueError for an empty file
            raise CheckpointError(f"`{path}` cannot be read ({error})", "Check the path.") from error

    def read(self, name: str) -> torch.Tensor:
        """One tensor: float16 and bfloat16 as stored, everything else as float32."""
        tensor = self.tensors[name]
        raw = self._raw(tensor.offset, tensor.num_bytes)
        plain = _PLAIN_TYPES.get(tensor.encoding)
        if plain is not None:
            return torch.from_numpy(raw).view(plain).reshape(tensor.shape)
        rows = raw.reshape(math.prod(tensor.shape[:-1]), -1)
        return torch.from_numpy(gguf.dequantize(rows, tensor.encoding)).reshape(tensor.shape)

    def sample(self, name: str, num_bytes: int) -> bytes:
        """Up to `num_bytes` stored bytes from the middle of a tensor."""
        tensor = self.tensors[name]
        length = min(num_bytes, tensor.num_bytes)
        return self._raw(tensor.offset + (tensor.num_bytes - length) // 2, length).tobytes()

    def _raw(self, offset: int, num_bytes: int) -> np.ndarray:
        try:
            raw = np.fromfile(self.path, dtype=np.uint8, count=num_bytes, offset=offset)
        except OSError as error:
            raise CheckpointError(f"`{self.path}` cannot be read ({error})", "Did the file move? Try again.") from error
        if len(raw) != num_bytes:
            raise CheckpointError(f"`{self.path}` was truncated while in use", "Download this file again.")
        return raw


def scalar(metadata: Mapping[str, Any], key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """`metadata[key]`, checked to be of `kind`. Raises CheckpointError when wrong, or absent without a default.

    A list whose entries are all equal counts as that entry: some writers state per-layer values.
    """
    value = metadata.get(key, default)
    if value is ...:
        raise CheckpointError(f"`{key}` is missing from the GGUF metadata", "Convert the model again with llama.cpp.")
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        raise CheckpointError(f"`{key}` is {_shortened(value)}, which is not supported", "Use a model with one value.")
    return value


class _Malformed(Exception):
    """The bytes are no valid file; the message continues a sentence that starts with the path."""


class _Cursor:
    """Reads forward through the bytes and refuses to pass their end."""

    def __init__(self, content: mmap.mmap):
        self.content, self.size, self.position = content, len(content), 0

    def advance(self, num_bytes: int) -> int:
        """Position of the next `num_bytes`, which are then behind the cursor."""
        start = self.position
        if num_bytes > self.size - start:
            raise _Malformed(f"is truncated: its header needs more than its {self.size} bytes")
        self.position = start + num_bytes
        return start

    def number(self, layout: str) -> Any:
        return struct.unpack_from(layout, self.content, self.advance(struct.calcsize(layout)))[0]

    def text(self) -> str:
        length = self.number("<Q")
        start = self.advance(length)
        return self.content[start : start + length].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            return self.array()
        if kind in _SCALARS:
            return _exact(kind, self.number(_SCALARS[kind]))
        raise _Malformed(f"is corrupt: unknown metadata type {kind}")

    def array(self) -> list:
        kind, length = self.number("<I"), self.number("<Q")
        if kind == GGUFValueType.STRING:
            if length * 8 > self.size - self.position:
                raise _Malformed(f"is truncated or corrupt: an array of {length} strings does not fit")
            return [self.text() for _ in range(length)]
        if kind not in _SCALARS:
            raise _Malformed(f"is corrupt: unknown array type {kind}")
        layout = np.dtype(_SCALARS[kind])
        start = self.advance(length * layout.itemsize)
        return np.frombuffer(self.content[start : self.position], dtype=layout).tolist()


def _exact(kind: int, value: Any) -> Any:
    """float32 as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if kind == GGUFValueType.FLOAT32 else value


def _parse(content: mmap.mmap) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    cursor = _Cursor(content)
    if content[:4] != MAGIC:
        raise _Malformed("is not a GGUF file: it does not start with the letters GGUF")
    cursor.advance(4)
    version = cursor.number("<I")
    if version not in SUPPORTED_VERSIONS:
        kind = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
        raise _Malformed(f"is {kind}; supported: little-endian, versions {' and '.join(map(str, SUPPORTED_VERSIONS))}")
    num_tensors, num_fields = cursor.number("<Q"), cursor.number("<Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):  # a hostile count runs into the end of the file
        key = cursor.text()
        metadata[key] = cursor.value(cursor.number("<I"))
    described = [_read_description(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise _Malformed(f"is corrupt: `general.alignment` is {_shortened(alignment)}, expected a power of two")
    data_start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for tensor in described:
        if tensor.name in tensors:
            raise _Malformed(f"is corrupt: it has two tensors `{tensor.name}`")
        end = data_start + tensor.offset + tensor.num_bytes
        if end > cursor.size:
            raise _Malformed(f"is truncated: tensor `{tensor.name}` ends at byte {end}, the file at {cursor.size}")
        tensors[tensor.name] = StoredTensor(
            tensor.name, tensor.shape, tensor.encoding, data_start + tensor.offset, tensor.num_bytes
        )
    return metadata, tensors


def _read_description(cursor: _Cursor) -> StoredTensor:
    """One entry of the tensor table; its offset is still relative to the start of the data."""
    name = cursor.text()
    num_dimensions = cursor.number("<I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise _Malformed(f"is corrupt: tensor `{_shortened(name)}` has {num_dimensions} dimensions")
    shape = tuple(cursor.number("<Q") for _ in range(num_dimensions))[::-1]
    number, offset = cursor.number("<I"), cursor.number("<Q")
    try:
        encoding = GGMLQuantizationType(number)
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[encoding]
    except (ValueError, KeyError) as error:
        raise _Malformed(f"holds tensor `{name}` in encoding {number}, which the gguf package does not know") from error
    if encoding not in _PLAIN_TYPES and not _can_dequantize(encoding):
        raise _Malformed(f"holds tensor `{name}` as {encoding.name}, which cannot be dequantised")
    if 0 in shape or shape[-1] % block_elements:
        raise _Malformed(f"is corrupt: tensor `{name}` of shape {list(shape)} does not fit {encoding.name} blocks")
    return StoredTensor(name, shape, encoding, offset, math.prod(shape) // block_elements * block_bytes)


@functools.cache
def _can_dequantize(encoding: GGMLQuantizationType) -> bool:
    block = np.zeros((1, gguf.GGML_QUANT_SIZES[encoding][1]), dtype=np.uint8)
    try:
        gguf.dequantize(block, encoding)
    except NotImplementedError:
        return False
    return True


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
