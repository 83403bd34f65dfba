from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.checkpoints.gguf import open_gguf
from paceline.checkpoints.gguf_file import GgufFile, scalar
from paceline.errors import CheckpointError
from tiny_gguf import write_gguf


@pytest.fixture(scope="module")
def content(tiny, tmp_path_factory):
    path = write_gguf(tiny("llama")[1], tmp_path_factory.mktemp("gguf") / "model.gguf", gguf.GGMLQuantizationType.Q4_0)
    return path.read_bytes()


def _data_start(content: bytes) -> int:
    return content.rindex(b"output.weight") if b"output.weight" in content else len(content) // 2


def test_metadata_is_what_the_gguf_package_reads(content, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata.keys() == fields.keys()
    for key, value in fields.items():
        assert ours.metadata[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)
    for tensor in theirs.tensors:
        stored = ours.tensors[tensor.name]
        assert (stored.offset, stored.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert stored.shape == tuple(reversed(tensor.shape.tolist()))


def test_floats_mean_the_decimal_that_was_written(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_layer_norm_rms_eps(1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert GgufFile(tmp_path / "x.gguf").metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.1, 0.3, 0.6, 0.9, 0.999])
def test_a_truncated_file_is_refused(content, tmp_path, share):
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match=r"truncated|cannot be read|not a GGUF file"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"PK\x03\x04" + b"\0" * 40, "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "of version 1; supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**63), "truncated"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "truncated"),
        (b"GGUF" + struct.pack("<IQQQsIIQ", 3, 0, 1, 1, b"a", 9, 4, 2**60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQsIIQ", 3, 0, 1, 1, b"a", 9, 8, 2**60), "does not fit"),
        (b"GGUF" + struct.pack("<IQQQsIIQ", 3, 0, 1, 1, b"a", 9, 9, 2**60), "unknown array type 9"),
        (b"GGUF" + struct.pack("<IQQQsI", 3, 0, 1, 1, b"a", 77), "unknown metadata type 77"),
        (b"GGUF" + struct.pack("<IQQQsI", 3, 1, 0, 1, b"w", 5), "5 dimensions"),
        (b"GGUF" + struct.pack("<IQQQsIQIQ", 3, 1, 0, 1, b"w", 1, 2**62, 0, 0), "truncated"),
        (b"GGUF" + struct.pack("<IQQQsIQIQ", 3, 1, 0, 1, b"w", 1, 32, 999, 0), "encoding 999"),
        (b"GGUF" + struct.pack("<IQQQsIQIQ", 3, 1, 0, 1, b"w", 1, 32, 24, 0), "as I8, which cannot be dequantised"),
        (b"GGUF" + struct.pack("<IQQQsIQIQ", 3, 1, 0, 1, b"w", 1, 33, 8, 0), "does not fit Q8_0 blocks"),
    ],
)
def test_malformed_headers_are_refused_at_once(tmp_path, start, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(start)
    with pytest.raises(CheckpointError, match=message):
        GgufFile(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_ends_in_a_checkpoint_or_a_checkpoint_error(content, tmp_path, data):
    damaged = bytearray(content)
    header_bytes = content.index(b"token_embd.weight") + 4000
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, header_bytes))
        damaged[position] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        open_gguf(path)
    except CheckpointError as error:
        assert str(path) in str(error)


def test_a_file_that_shrinks_while_in_use_is_an_error(content, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    file = GgufFile(path)
    path.write_bytes(content[: _data_start(content)])
    with pytest.raises(CheckpointError, match="truncated while in use"):
        file.read("blk.2.ffn_down.weight")


def test_scalar_takes_a_list_of_equal_values_for_one():
    assert scalar({"heads": [4, 4, 4]}, "heads", int) == 4
    assert scalar({}, "heads", int, 7) == 7
    for wrong in ([4, 8], "4", True, np.int64(4)):
        with pytest.raises(CheckpointError, match="`heads` is"):
            scalar({"heads": wrong}, "heads", int)
    with pytest.raises(CheckpointError, match="`heads` is missing"):
        scalar({}, "heads", int)
