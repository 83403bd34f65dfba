from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config.load import parse_config
from paceline.config.options import section_of
from paceline.config.schema import Config
from paceline.config.truss import lookahead_draft_length, translate_truss
from paceline.config.truss_schema import MARKS, Becomes, TrussFile, TrussFileV2
from paceline.errors import ConfigError

# Verbatim, as the issue and the preset have it.
REFERENCE = """\
model_metadata:
  tags:
  - openai-compatible
model_name: Qwen2.5-Coder-14B-Instruct (SpecDec)
resources:
  accelerator: H100
  cpu: '1'
  memory: 24Gi
  use_gpu: true
trt_llm:
  build:
    base_model: qwen
    checkpoint_repository:
      repo: Qwen/Qwen2.5-Coder-14B-Instruct
      source: HF
    max_seq_len: 10000
    plugin_configuration:
      paged_kv_cache: true
      use_paged_context_fmha: true
    speculator:
      speculative_decoding_mode: DRAFT_TOKENS_EXTERNAL
      checkpoint_repository:
        repo: Qwen/Qwen2.5-Coder-0.5B-Instruct
        source: HF
      num_draft_tokens: 4
  runtime:
    enable_chunked_context: true
    kv_cache_free_gpu_mem_fraction: 0.62
    request_default_max_tokens: 1000
    total_token_limit: 500000
"""


def truss(build: dict | None = None, runtime: dict | None = None, speculator: dict | None = None, **top) -> dict:
    """A minimal Truss tree with changes; a value of `...` removes a key."""
    tree_build = {"checkpoint_repository": {"repo": "a/b", "source": "HF"}, **(build or {})}
    if speculator is not None:
        external = {"checkpoint_repository": {"repo": "c/d", "source": "HF"}, "num_draft_tokens": 4, **speculator}
        tree_build["speculator"] = {key: value for key, value in external.items() if value is not ...}
    tree_build = {key: value for key, value in tree_build.items() if value is not ...}
    return {"trt_llm": {"build": tree_build, "runtime": runtime or {}}, **top}


def config_of(tree: dict) -> Config:
    translation = translate_truss(tree)
    assert not translation.problems
    return Config.model_validate(translation.tree)


def refused(tree: dict) -> list[str]:
    return [str(problem) for problem in translate_truss(tree).problems]


def notes(tree: dict) -> dict[str, str]:
    return {note.path: note.message for note in translate_truss(tree).notes}


def test_reference_sample_verbatim():
    loaded = parse_config(REFERENCE, "reference.yaml")
    assert loaded.config == Config.model_validate(
        {
            "model": {"repo": "Qwen/Qwen2.5-Coder-14B-Instruct", "source": "hub"},
            "served_model_name": "Qwen2.5-Coder-14B-Instruct (SpecDec)",
            "max_seq_len": 10000,
            "speculation": {
                "draft": {"repo": "Qwen/Qwen2.5-Coder-0.5B-Instruct", "source": "hub"},
                "num_draft_tokens": 4,
            },
            "runtime": {"kv_cache_free_mem_fraction": 0.62, "request_default_max_tokens": 1000},
        }
    )
    origin = loaded.origin("speculation.num_draft_tokens")
    assert (origin.place, origin.spelled) == ("reference.yaml:25", "trt_llm.build.speculator.num_draft_tokens")
    assert loaded.origin("model").place == "reference.yaml:14"
    assert loaded.origin("quantization").kind == "default"
    assert {note.path for note in loaded.notes} == {
        "model_metadata", "resources.accelerator", "resources.cpu", "resources.memory", "resources.use_gpu",
    }  # fmt: skip


def _fields(model, prefix=""):
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}", info
        if section_of(info) is not None:
            yield from _fields(section_of(info), f"{prefix}{name}.")


@pytest.mark.parametrize("model", [TrussFile, TrussFileV2])
def test_every_truss_field_says_what_becomes_of_it(model):
    ours = dict(_fields(Config))
    for path, info in _fields(model):
        marks = [item for item in info.metadata if isinstance(item, MARKS)]
        assert len(marks) == 1, path
        if isinstance(marks[0], Becomes):
            assert marks[0].path in ours, path


def test_leniency_of_real_files():
    tree = truss(
        {"base_model": "llama"},
        python_version="py39", requirements=[], secrets={"hf_access_token": None}, model_name="A b (c)",
        model_metadata={"example_model_input": {"messages": [{"role": "user"}], 3: None}, "repo_id": "x"},
        resources={"accelerator": "H100", "cpu": "500m", "memory": "24Gi", "use_gpu": True},
    )  # fmt: skip
    tree["trt_llm"].pop("runtime")
    assert config_of(tree).served_model_name == "A b (c)"
    assert "python_version" in notes(tree)
    assert "requirements" not in notes(tree)


def test_runtime_fields_under_build_are_moved_and_explicit_ones_win():
    tree = truss({"kv_cache_free_gpu_mem_fraction": 0.3, "total_token_limit": 9000}, {"total_token_limit": 8000})
    config = config_of(tree)
    assert (config.runtime.kv_cache_free_mem_fraction, config.runtime.total_token_limit) == (0.3, 8000)
    assert notes(tree) == {
        "trt_llm.build.kv_cache_free_gpu_mem_fraction": "belongs under `trt_llm.runtime` and was moved there",
        "trt_llm.build.total_token_limit": "belongs under `trt_llm.runtime` and was moved there; the value of "
        "`trt_llm.runtime.total_token_limit` is used",
    }
    assert all(note.is_warning for note in translate_truss(tree).notes)
    assert tree["trt_llm"]["build"]["total_token_limit"] == 9000  # the input is left alone


@pytest.mark.parametrize(
    ("kind", "ours"),
    [("no_quant", "bf16"), ("fp8", "int8"), ("fp8_kv", "int8"), ("fp4", "int8"), ("weights_int4", "int8")],
)
def test_quantization_types(kind, ours):
    tree = truss({"quantization_type": kind})
    assert config_of(tree).quantization == ours
    assert kind in notes(tree)["trt_llm.build.quantization_type"]


def test_absent_quantization_is_ours_to_choose():
    assert config_of(truss()).quantization == "auto"


def test_token_limit_of_minus_one_is_no_limit():
    assert config_of(truss(runtime={"total_token_limit": -1})).runtime.total_token_limit is None
    assert refused(truss(runtime={"total_token_limit": 0})) == [
        "`trt_llm.runtime.total_token_limit` must be -1 (no limit) or at least 1, got 0"
    ]


def test_paged_context_off_turns_the_prefix_cache_off():
    flags = {"paged_kv_cache": True, "use_paged_context_fmha": False}
    tree = truss({"plugin_configuration": flags}, {"enable_chunked_context": False})
    assert config_of(tree).runtime.enable_prefix_cache is False


def test_unchunked_prompts_get_truss_default_rows():
    tree = truss({"max_seq_len": 8192}, {"enable_chunked_context": False})
    assert config_of(tree).build.max_num_tokens == 8192
    assert config_of(truss({"max_num_tokens": 4096}, {"enable_chunked_context": False})).build.max_num_tokens == 4096


def test_draft_build_block():
    draft = {"checkpoint_repository": {"repo": "c/d", "revision": "v2"}, "quantization_type": "fp8", "max_seq_len": 99}
    tree = truss(speculator={"checkpoint_repository": ..., "build": draft, "runtime": {"total_token_limit": 5}})
    config = config_of(tree)
    assert (str(config.speculation.draft), config.build.draft_quantization) == ("c/d@v2", "int8")
    assert config.max_seq_len is None
    assert {"trt_llm.build.speculator.build.max_seq_len", "trt_llm.build.speculator.runtime"} <= set(notes(tree))


@pytest.mark.parametrize(("sizes", "length"), [((7, 5, 5), 47), ((1, 32, 1), 61), ((1, 1, 1), 0), ((1, 16, 1), 29)])
def test_lookahead_draft_length(sizes, length):
    assert lookahead_draft_length(*sizes) == length


def lookahead(windows, ngram, verification, **more) -> dict:
    return truss(
        speculator={
            "speculative_decoding_mode": "LOOKAHEAD_DECODING", "checkpoint_repository": ..., "num_draft_tokens": ...,
            "lookahead_windows_size": windows, "lookahead_ngram_size": ngram,
            "lookahead_verification_set_size": verification, **more,
        }
    )  # fmt: skip


def test_lookahead_becomes_the_suffix_drafter():
    speculation = config_of(lookahead(1, 32, 1)).speculation
    assert (speculation.method, speculation.num_draft_tokens, speculation.draft) == ("suffix", 61, None)
    assert config_of(lookahead(1, 8, 1, num_draft_tokens=61)).speculation.num_draft_tokens == 61
    mode = "trt_llm.build.speculator.speculative_decoding_mode"
    assert notes(lookahead(1, 8, 1))[mode] == (
        "LOOKAHEAD_DECODING is served by the suffix drafter, up to 13 tokens per round; unlike lookahead it takes "
        "every sampling parameter"
    )
    assert "trt_llm.build.speculator.num_draft_tokens" in notes(lookahead(1, 300, 1))


SPECULATOR = "trt_llm.build.speculator"


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (truss(speculator={"checkpoint_repository": ...}),
         [f"`{SPECULATOR}` has neither `checkpoint_repository` nor `build`"]),
        (truss(speculator={"build": {"checkpoint_repository": {"repo": "c/d"}}}),
         [f"`{SPECULATOR}` has both `checkpoint_repository` and `build`"]),
        (truss(speculator={"num_draft_tokens": ...}), [f"`{SPECULATOR}.num_draft_tokens` is missing"]),
        (truss(speculator={"num_draft_tokens": 0}),
         [f"`{SPECULATOR}.num_draft_tokens` must be a whole number from 1 to 2048 (or left out), got 0"]),
        (truss(speculator={"num_draft_tokens": 2049}),
         [f"`{SPECULATOR}.num_draft_tokens` must be a whole number from 1 to 2048 (or left out), got 2049"]),
        (truss(speculator={"num_draft_tokens": "4"}),
         [f'`{SPECULATOR}.num_draft_tokens` must be a whole number from 1 to 2048 (or left out), got "4"']),
        (truss(speculator={"num_draft_tokens": 4.0}),
         [f"`{SPECULATOR}.num_draft_tokens` must be a whole number from 1 to 2048 (or left out), got 4.0"]),
        (truss(speculator={"speculative_decoding_mode": "draft_tokens_external"}),
         [f"`{SPECULATOR}.speculative_decoding_mode` must be one of `DRAFT_TOKENS_EXTERNAL`, `LOOKAHEAD_DECODING`, got "
          '"draft_tokens_external"']),
        (truss(speculator={"lookahead_ngram_size": 3}),
         [f"`{SPECULATOR}.lookahead_ngram_size` needs `speculative_decoding_mode: LOOKAHEAD_DECODING`"]),
        (truss({"plugin_configuration": {"use_paged_context_fmha": False}}, speculator={}),
         ["`trt_llm.build.plugin_configuration.use_paged_context_fmha` must be `true` with a speculator, got false"]),
        (truss({"plugin_configuration": {"paged_kv_cache": False}}),
         ["`trt_llm.build.plugin_configuration.paged_kv_cache` must be `true` with `use_paged_context_fmha`, got "
          "false"]),
        (truss({"plugin_configuration": {"use_paged_context_fmha": False}}),
         ["`trt_llm.build.plugin_configuration.use_paged_context_fmha` must be `true` with chunked context, got "
          "false"]),
        (truss({"plugin_configuration": {"use_fp8_context_fmha": True}}),
         ["`trt_llm.build.plugin_configuration.use_fp8_context_fmha` needs `use_paged_context_fmha` and "
          "`quantization_type: fp8_kv`, got true"]),
        (lookahead(1, None, 1), [f"`{SPECULATOR}.lookahead_ngram_size` is needed by LOOKAHEAD_DECODING"]),
        (lookahead(1, 32, 1, num_draft_tokens=60),
         [f"`{SPECULATOR}.num_draft_tokens` must be at least 61 for these lookahead sizes, got 60"]),
        (lookahead(100, 100, 100), [f"`{SPECULATOR}.num_draft_tokens` must be at most 2048, got 19799"]),
        (truss({"tensor_parallel_count": 2}), ["`trt_llm.build.tensor_parallel_count` must be 1, got 2"]),
        (truss({"max_beam_width": 4}), ["`trt_llm.build.max_beam_width` must be 1, got 4"]),
        (truss({"lora_adapters": {"x": {"repo": "a/b"}}}),
         ["`trt_llm.build.lora_adapters` cannot be honoured, got a mapping with x"]),
        (truss(runtime={"lora_cache_max_adapter_size": 8}),
         ["`trt_llm.runtime.lora_cache_max_adapter_size` cannot be honoured, got 8"]),
        (truss({"base_model": "whisper"}), ["`trt_llm.build.base_model` must be a decoder, got whisper"]),
        (truss({"checkpoint_repository": {"repo": "gs://x", "source": "GCS"}}),
         ["`trt_llm.build.checkpoint_repository.source` must be `HF` or `LOCAL`, got `GCS`"]),
        (truss({"checkpoint_repository": ...}), ["`trt_llm.build.checkpoint_repository` is missing"]),
        (truss({"quantization_config": {"calib_size": 100}}),
         ["`trt_llm.build.quantization_config.calib_size` must be a whole number divisible by 64 from 64 to 16384, got "
          "100"]),
        (truss(resources={"accelerator": "H100:2"}),
         ["`resources.accelerator` has 2 devices, but the parallel counts multiply to 1"]),
        (truss(resources={"accelerator": "H100:0"}),
         ['`resources.accelerator` must be NAME or NAME:COUNT, got "H100:0"']),
        (truss(resources={"accelerator": "T4"}), ['`resources.accelerator` cannot run TensorRT-LLM, got "T4"']),
        (truss({"quantization_type": "fp8"}, resources={"accelerator": "A100"}),
         ["`trt_llm.build.quantization_type` fp8 does not run on A100"]),
        (truss({"quantization_type": "fp4"}, resources={"accelerator": "H100"}),
         ["`trt_llm.build.quantization_type` fp4 needs B200, B300, GB300, RTX_PRO_6000, got H100"]),
        (truss(model_metadata={"tags": ["force-legacy-api-non-openai-compatible"]}),
         ["`model_metadata.tags` asks for the legacy API (`force-legacy-api-non-openai-compatible`)"]),
        (truss(model_metadata={"tags": ["openai-compatible", "force-legacy-api-non-openai-compatible"]}),
         ["`model_metadata.tags` has both `openai-compatible` and `force-legacy-api-non-openai-compatible`"]),
        (truss(model="a/b"), ["`model` does not go with `trt_llm`"]),
        ({"trt_llm": {"target": {}, "draft": {}}}, ["`trt_llm.target` is the form of truss 0.9.55"]),
        ({"trt_llm": None}, ["`trt_llm` must be a mapping, got nothing"]),
    ],
)  # fmt: skip
def test_refused_by_field_name(tree, expected):
    assert refused(tree) == expected


def test_unknown_keys_get_the_nearest_name():
    tree = truss({"max_seqlen": 5, "tensor_parallel_size": 1}, speculator={"num_draft_token": 4})
    assert [(problem.path, problem.hint) for problem in translate_truss(tree).problems] == [
        (f"{SPECULATOR}.num_draft_token", "Did you mean `num_draft_tokens`?"),
        ("trt_llm.build.max_seqlen", "Did you mean `max_seq_len`?"),
        ("trt_llm.build.tensor_parallel_size", "Did you mean `tensor_parallel_count`?"),
    ]


def test_several_problems_are_reported_together():
    tree = truss({"max_beam_width": 2, "lora_adapters": {"a": 1}}, speculator={"num_draft_tokens": ...})
    assert len(refused(tree)) == 3


def test_v2():
    tree = {
        "trt_llm": {
            "inference_stack": "v2",
            "build": {"checkpoint_repository": {"repo": "a/b"}, "quantization_type": "fp8"},
            "runtime": {"max_seq_len": 4096, "max_batch_size": 8, "enable_chunked_prefill": True},
        }
    }
    config = config_of(tree)
    assert (config.max_seq_len, config.build.max_batch_size, config.quantization) == (4096, 8, "int8")
    tree["trt_llm"]["build"]["speculator"] = {}
    assert refused(tree) == ["`trt_llm.build.speculator` is not an option"]


SAMPLES = Path(__file__).resolve().parents[3] / "shared" / "configs"


@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the public sample configs are not on this machine")
def test_public_samples_translate_or_are_refused_by_name():
    for path in sorted(SAMPLES.glob("*.yaml")):
        try:
            assert parse_config(path.read_text(), path.name).config.max_seq_len is not None
        except ConfigError as error:
            assert path.name.startswith("2b_")
            assert "`trt_llm.build.tensor_parallel_count` must be 1, got 2" in error.message
