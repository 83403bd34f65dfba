"""Our safetensors files: readable by the library, aligned, and refused when damaged."""

from __future__ import annotations

import contextlib
import hashlib
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from paceline.build import tensor_file
from paceline.build.tensor_file import ALIGNMENT, HEADER_BYTES, read_tensors, write_tensors
from paceline.errors import EngineFolderError

DTYPES = [torch.uint8, torch.bfloat16, torch.float32]


def sample(count: int = 4) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"t{i}": (torch.randn(3 + i, 5) * 50).abs().to(DTYPES[i % 3]) for i in range(count)}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3)), max_size=6))
def test_round_trip_and_alignment(tmp_path_factory, shapes):
    path = tmp_path_factory.mktemp("t") / "x.safetensors"
    tensors = {f"t{i}": (torch.randn(shape) * 9).abs().to(dtype) for i, (dtype, shape) in enumerate(shapes)}
    digest = write_tensors(path, tensors.items())
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    read = read_tensors(path, digest)
    assert read.keys() == tensors.keys()
    with safe_open(path, "pt") as reference:
        for name, tensor in tensors.items():
            assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
            assert torch.equal(reference.get_tensor(name), tensor)
            if tensor.numel():
                assert read[name].data_ptr() % ALIGNMENT == 0


def test_strided_tensors_are_written_as_they_look(tmp_path):
    tensor = torch.arange(12.0).view(3, 4).T
    write_tensors(tmp_path / "x", [("t", tensor)])
    assert torch.equal(read_tensors(tmp_path / "x")["t"], tensor)


def test_tensors_are_written_before_the_next_is_asked_for(tmp_path):
    sizes = []

    def produce():
        for index in range(5):
            sizes.append((tmp_path / "x").stat().st_size)
            yield f"t{index}", torch.ones(1 << 18)

    write_tensors(tmp_path / "x", produce())
    assert sizes[1:] == [HEADER_BYTES + (index << 20) for index in range(1, 5)]


def test_header_that_does_not_fit_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "HEADER_BYTES", 128)
    with pytest.raises(ValueError, match="do not fit"):
        write_tensors(tmp_path / "x", sample().items())


@pytest.mark.parametrize("size", [0, 7, 8, 100, HEADER_BYTES, HEADER_BYTES + 60])
@pytest.mark.parametrize("checked", [True, False])
def test_truncated(tmp_path, size, checked):
    digest = write_tensors(tmp_path / "x", sample().items())
    content = (tmp_path / "x").read_bytes()[:size]
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(EngineFolderError) as caught:
        read_tensors(tmp_path / "x", digest if checked else None)
    assert "again" in caught.value.hint


@pytest.mark.parametrize("position", [3, 20, HEADER_BYTES + 5, -1])
def test_any_flipped_bit_is_noticed(tmp_path, position):
    digest = write_tensors(tmp_path / "x", sample().items())
    content = bytearray((tmp_path / "x").read_bytes())
    content[position] ^= 4
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(EngineFolderError, match="contents changed"):
        read_tensors(tmp_path / "x", digest)


@pytest.mark.parametrize(
    "header",
    [
        [],
        None,
        3,
        {"t": None},
        {"t": {}},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"t": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}},
        {"t": {"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}},
        {"t": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}},
        {"t": {"dtype": "I99", "shape": [2], "data_offsets": [0, 8]}},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0.5, 8.5]}},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
    ],
)
def test_hostile_headers(tmp_path, header):
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    with pytest.raises(EngineFolderError, match="not a valid tensor file"):
        read_tensors(tmp_path / "x")


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_never_escapes(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("g") / "x"
    path.write_bytes(content)
    with contextlib.suppress(EngineFolderError):
        assert isinstance(read_tensors(path), dict)


def test_missing_file(tmp_path):
    with pytest.raises(EngineFolderError, match="No such file"):
        read_tensors(tmp_path / "x")
