"""The engine folder is checked when it is read: whatever was done to it, the error says what and what to do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import build_tiny
from paceline.build import manifest as manifest_module
from paceline.build.builder import load_weights
from paceline.build.manifest import check_files, read_manifest, read_small_file, write_manifest, write_whole
from paceline.errors import EngineFolderError


@pytest.fixture(scope="module")
def built(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("built") / "engine"
    build_tiny(tiny("llama")[0], folder)
    return folder


@pytest.fixture
def engine(built, tmp_path) -> Path:
    """A copy to damage."""
    folder = tmp_path / "engine"
    folder.mkdir()
    for file in built.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def edit(folder: Path, change) -> None:
    document = json.loads((folder / "manifest.json").read_text())
    change(document)
    (folder / "manifest.json").write_text(json.dumps(document))


def test_round_trip(engine):
    manifest = read_manifest(engine)
    write_manifest(engine, manifest)
    assert read_manifest(engine) == manifest
    check_files(engine, manifest)


def test_reformatting_the_file_changes_nothing(engine):
    before = read_manifest(engine)
    edit(engine, lambda document: None)
    assert read_manifest(engine) == before


def test_missing_folder(tmp_path):
    with pytest.raises(EngineFolderError, match="there is no engine at") as caught:
        read_manifest(tmp_path / "nothing")
    assert "paceline build" in caught.value.hint and caught.value.exit_code == 5


def test_unfinished_folder(tmp_path):
    with pytest.raises(EngineFolderError, match=r"not a finished engine: it has no manifest\.json") as caught:
        read_manifest(tmp_path)
    assert "resumed" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["engine"].update(num_draft_tokens=9), "was edited"),
        (lambda d: d["engine"]["config"]["runtime"].update(kv_cache_bytes=1), "was edited"),
        (lambda d: d.update(sha256="0" * 64), "was edited"),
        (lambda d: d.pop("sha256"), "was edited"),
        (lambda d: d["engine"].update(surprise=1), "`surprise`"),
        (lambda d: d["engine"]["target"].pop("vocab_size"), r"`target\.vocab_size`"),
        (lambda d: d["engine"].update(eos_token_ids="x"), "`eos_token_ids`"),
        (lambda d: d["engine"].pop("format_version"), "has no `format_version`"),
        (lambda d: d.pop("engine"), "has no `engine`"),
    ],
)
def test_edited_manifest(engine, change, message):
    edit(engine, change)
    with pytest.raises(EngineFolderError, match=message) as caught:
        read_manifest(engine)
    assert "build" in caught.value.hint


@pytest.mark.parametrize(("version", "hint"), [(2, "upgrade Paceline"), (0, "build the engine again"), ("x", "build")])
def test_other_format_versions(engine, version, hint):
    edit(engine, lambda document: document["engine"].update(format_version=version))
    with pytest.raises(EngineFolderError, match="this Paceline reads format 1") as caught:
        read_manifest(engine)
    assert hint in caught.value.hint


def test_newer_format_is_recognised_whatever_else_it_holds(engine):
    (engine / "manifest.json").write_text('{"engine": {"format_version": 7, "wholly": "different"}}')
    with pytest.raises(EngineFolderError, match="engine format 7"):
        read_manifest(engine)


GARBAGE = ["", "{", "[]", "null", "7", '"x"', '{"engine": []}', '{"engine": null}', "[" * 100_000]


@pytest.mark.parametrize("text", GARBAGE)
def test_garbage(engine, text):
    (engine / "manifest.json").write_text(text)
    with pytest.raises(EngineFolderError):
        read_manifest(engine)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=40), st.integers(0, 4000))
def test_no_damaged_byte_goes_unnoticed_or_escapes(engine, built, junk, position):
    original = (built / "manifest.json").read_bytes()
    damaged = original[:position] + junk + original[position + len(junk) :]
    (engine / "manifest.json").write_bytes(damaged)
    try:
        manifest = read_manifest(engine)
    except EngineFolderError:
        return
    assert manifest == read_manifest(built)


def test_manifest_that_is_a_directory(engine):
    (engine / "manifest.json").unlink()
    (engine / "manifest.json").mkdir()
    with pytest.raises(EngineFolderError, match="cannot be read"):
        read_manifest(engine)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_small_files(engine, name):
    manifest = read_manifest(engine)
    assert read_small_file(engine, name, manifest)
    assert read_small_file(engine, "absent", manifest) is None
    (engine / name).write_text("{}")
    with pytest.raises(EngineFolderError, match="was changed after the build"):
        read_small_file(engine, name, manifest)
    (engine / name).unlink()
    for check in (lambda: read_small_file(engine, name, manifest), lambda: check_files(engine, manifest)):
        with pytest.raises(EngineFolderError, match="No such file") as caught:
            check()
        assert "build the engine again" in caught.value.hint


def test_weights_of_another_size_and_missing_weights(engine):
    manifest, path = read_manifest(engine), engine / "target.safetensors"
    os.truncate(path, 1000)
    with pytest.raises(EngineFolderError, match="has 1000 bytes instead of"):
        check_files(engine, manifest)
    with pytest.raises(EngineFolderError, match="contents changed"):
        load_weights(engine, "target", manifest.target)
    path.unlink()
    for check in (lambda: check_files(engine, manifest), lambda: load_weights(engine, "target", manifest.target)):
        with pytest.raises(EngineFolderError, match="No such file"):
            check()


def test_architecture_edited_into_nonsense(engine):
    record = read_manifest(engine).target
    with pytest.raises(EngineFolderError, match="architecture"):
        record.model_copy(update={"architecture": {"family": "llama"}}).to_architecture()
    assert record.to_architecture().num_layers == 3


def test_write_whole_never_leaves_half_a_file(tmp_path, monkeypatch):
    write_whole(tmp_path / "file", "old")

    def interrupted(source, destination):
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest_module.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
