"""The Truss `trt_llm` form as pydantic models: its names, types, bounds, and what each field becomes here.

Each field carries exactly one mark: `Becomes` (an option of ours), `NoEffect` (accepted and noted), `Only` (accepted
at one value, refused by name otherwise) or `Translated` (code in `truss.py`). A test holds every field to that, so
nothing can be ignored by accident. Bounds follow truss 0.10; rules that span fields are in `truss.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from paceline.config.schema import (
    MAX_BATCH_SIZE,
    MAX_DRAFT_TOKENS,
    MAX_SEQ_LEN,
    Flag,
    Integer,
    Options,
    Text,
    empty_section,
)


@dataclass(frozen=True)
class Becomes:
    """The field's value is passed on as option `path`."""

    path: str


@dataclass(frozen=True)
class NoEffect:
    """The field is accepted and changes nothing here, because of `why`."""

    why: str


@dataclass(frozen=True)
class Only:
    """The field is refused unless its value is one of `values`."""

    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class Translated:
    """The field is handled by code; `how` says what becomes of it."""

    how: str


MARKS = (Becomes, NoEffect, Only, Translated)

PLATFORM = NoEffect("it configures the hosting platform")
OWN_CODE = NoEffect("no user code runs in the engine")
OWN_KERNELS = NoEffect("it tunes TensorRT-LLM; kernels are measured and chosen at build")
ONE_DEVICE = "the engine runs on one device"
NO_LORA = "LoRA adapters are not supported"

QuantizationType = Literal[
    "no_quant", "fp8", "fp8_kv", "fp8_mlp_only", "fp4", "fp4_kv", "fp4_mlp_only",
    "weights_int8", "weights_kv_int8", "weights_int4", "weights_int4_kv_int8", "smooth_quant",
]  # fmt: skip
BaseModelName = Literal[
    "decoder", "llama", "mistral", "qwen", "deepseek", "palmyra", "encoder", "encoder_bert", "whisper"
]


class TrussCheckpoint(Options):
    repo: Annotated[Text, Translated("the repository of the model reference")]
    source: Annotated[
        Literal["HF", "GCS", "S3", "AZURE", "LOCAL", "REMOTE_URL", "BASETEN_TRAINING"],
        Translated("`HF` is a hub id and `LOCAL` a directory; the others are refused"),
    ] = "HF"
    revision: Annotated[Text | None, Translated("the revision of the model reference")] = None
    runtime_secret_name: Annotated[Text | None, NoEffect("the hub token is read from the environment (`HF_TOKEN`)")] = (
        None
    )


class TrussPlugins(Options):
    paged_kv_cache: Annotated[Flag, Translated("required by speculation; the KV cache is always paged")] = True
    use_paged_context_fmha: Annotated[
        Flag, Translated("`false` turns `runtime.enable_prefix_cache` off; required by speculation")
    ] = True
    use_fp8_context_fmha: Annotated[Flag, Translated("checked; attention runs in bf16")] = False
    gemm_plugin: Annotated[Text | None, OWN_KERNELS] = None


class TrussCalibration(Options):
    calib_size: Annotated[Integer, Field(ge=64, le=16384, multiple_of=64), NoEffect("int8 needs no calibration")] = 1024
    calib_dataset: Annotated[Text, NoEffect("int8 needs no calibration")] = "abisee/cnn_dailymail"
    calib_max_seq_length: Annotated[
        Integer, Field(ge=64, le=16384, multiple_of=64), NoEffect("int8 needs no calibration")
    ] = 1536


class TrussRuntime(Options):
    kv_cache_free_gpu_mem_fraction: Annotated[
        float, Field(strict=True, gt=0, le=1), Becomes("runtime.kv_cache_free_mem_fraction")
    ] = 0.9
    enable_chunked_context: Annotated[Flag, Becomes("runtime.enable_chunked_context")] = True
    batch_scheduler_policy: Annotated[
        Literal["guaranteed_no_evict", "max_utilization"], Becomes("runtime.batch_scheduler_policy")
    ] = "guaranteed_no_evict"
    request_default_max_tokens: Annotated[
        Integer | None, Field(ge=1, le=MAX_SEQ_LEN), Becomes("runtime.request_default_max_tokens")
    ] = None
    total_token_limit: Annotated[
        Integer, Field(ge=-1, le=1 << 40), Translated("`runtime.total_token_limit`; -1 is no limit")
    ] = 500_000
    kv_cache_host_memory_bytes: Annotated[
        Integer | None, Field(ge=1), NoEffect("the KV cache is not moved to other memory")
    ] = None
    served_model_name: Annotated[Text | None, Becomes("served_model_name")] = None
    webserver_default_route: Annotated[Text | None, NoEffect("it routes encoders; the OpenAI routes are served")] = None
    lora_cache_max_adapter_size: Annotated[Any, Only((None,), NO_LORA)] = None
    lora_cache_optimal_adapter_size: Annotated[Any, Only((None,), NO_LORA)] = None
    lora_cache_gpu_memory_fraction: Annotated[Any, Only((None,), NO_LORA)] = None
    lora_cache_host_memory_bytes: Annotated[Any, Only((None,), NO_LORA)] = None


class TrussModelBuild(Options):
    """A build block without its speculator: all that a draft model's own block may hold."""

    base_model: Annotated[
        BaseModelName, Translated("the architecture is read from the checkpoint; encoders and whisper are refused")
    ] = "decoder"
    checkpoint_repository: Annotated[TrussCheckpoint, Translated("`model`, or `speculation.draft`")]
    max_seq_len: Annotated[Integer | None, Field(ge=1, le=MAX_SEQ_LEN), Becomes("max_seq_len")] = None
    max_batch_size: Annotated[Integer, Field(ge=1, le=MAX_BATCH_SIZE), Becomes("build.max_batch_size")] = 256
    max_num_tokens: Annotated[Integer, Field(ge=65, le=MAX_SEQ_LEN), Becomes("build.max_num_tokens")] = 8192
    max_beam_width: Annotated[Integer, Field(ge=1), Only((1,), "there is no beam search")] = 1
    max_prompt_embedding_table_size: Annotated[
        Integer, Field(ge=0), Only((0,), "prompts are tokens, not embeddings")
    ] = 0
    gather_all_token_logits: Annotated[
        Flag, Only((False,), "prompt logits are not returned; ask for `logprobs` per request")
    ] = False
    strongly_typed: Annotated[Flag, OWN_KERNELS] = False
    quantization_type: Annotated[
        QuantizationType,
        Translated("`no_quant` is bf16; every 8-bit and 4-bit type is int8, the narrowest format here"),
    ] = "no_quant"
    quantization_config: Annotated[
        TrussCalibration | None, BeforeValidator(empty_section), NoEffect("int8 needs no calibration")
    ] = None
    tensor_parallel_count: Annotated[Integer, Field(ge=1), Only((1,), ONE_DEVICE)] = 1
    pipeline_parallel_count: Annotated[Integer, Field(ge=1), Only((1,), ONE_DEVICE)] = 1
    sequence_parallel_count: Annotated[Integer, Field(ge=1), Only((1,), ONE_DEVICE)] = 1
    moe_expert_parallel_option: Annotated[Integer, Field(ge=-1), Only((-1, 1), ONE_DEVICE)] = -1
    num_builder_gpus: Annotated[Integer | None, Field(ge=1), NoEffect("the engine is built where it runs")] = None
    plugin_configuration: Annotated[TrussPlugins, BeforeValidator(empty_section), Translated("see its fields")] = Field(
        default_factory=TrussPlugins
    )
    lora_adapters: Annotated[Any, Only((None, {}), NO_LORA)] = None
    lora_configuration: Annotated[Any, Only((None, {}), NO_LORA)] = None
    skip_build_result: Annotated[Flag, PLATFORM] = False


class TrussSpeculator(Options):
    speculative_decoding_mode: Annotated[
        Literal["DRAFT_TOKENS_EXTERNAL", "LOOKAHEAD_DECODING"],
        Translated("`speculation.method`: `auto` with the draft model, `suffix` for lookahead"),
    ] = "DRAFT_TOKENS_EXTERNAL"
    num_draft_tokens: Annotated[
        Integer | None, Field(ge=1, le=MAX_DRAFT_TOKENS), Translated("`speculation.num_draft_tokens`")
    ] = None
    checkpoint_repository: Annotated[TrussCheckpoint | None, Translated("`speculation.draft`")] = None
    build: Annotated[TrussModelBuild | None, Translated("`speculation.draft` and `build.draft_quantization`")] = None
    runtime: Annotated[
        TrussRuntime | None,
        BeforeValidator(empty_section),
        NoEffect("the draft model runs in the target's loop and memory"),
    ] = None
    lookahead_windows_size: Annotated[Integer | None, Field(ge=1), Translated("sets the draft length")] = None
    lookahead_ngram_size: Annotated[Integer | None, Field(ge=1), Translated("sets the draft length")] = None
    lookahead_verification_set_size: Annotated[Integer | None, Field(ge=1), Translated("sets the draft length")] = None
    enable_b10_lookahead: Annotated[Flag, NoEffect("lookahead is served by the suffix drafter either way")] = False


class TrussBuild(TrussModelBuild):
    speculator: Annotated[TrussSpeculator | None, Translated("`speculation`")] = None


class TrussBuildV2(Options):
    """What `inference_stack: v2` lets a build block hold."""

    checkpoint_repository: Annotated[TrussCheckpoint, Translated("`model`")]
    quantization_type: Annotated[QuantizationType, Translated("as in v1")] = "no_quant"
    quantization_config: Annotated[
        TrussCalibration | None, BeforeValidator(empty_section), NoEffect("int8 needs no calibration")
    ] = None
    num_builder_gpus: Annotated[Integer | None, Field(ge=1), NoEffect("the engine is built where it runs")] = None
    skip_build_result: Annotated[Flag, PLATFORM] = False


class TrussRuntimeV2(Options):
    max_seq_len: Annotated[Integer | None, Field(ge=1, le=MAX_SEQ_LEN), Becomes("max_seq_len")] = None
    max_batch_size: Annotated[Integer, Field(ge=1, le=MAX_BATCH_SIZE), Becomes("build.max_batch_size")] = 256
    max_num_tokens: Annotated[Integer, Field(ge=65, le=131_072), Becomes("build.max_num_tokens")] = 8192
    tensor_parallel_size: Annotated[Integer, Field(ge=1), Only((1,), ONE_DEVICE)] = 1
    enable_chunked_prefill: Annotated[Flag, Becomes("runtime.enable_chunked_context")] = True
    served_model_name: Annotated[Text | None, Becomes("served_model_name")] = None
    patch_kwargs: Annotated[Any, Only((None, {}), "it reaches into TensorRT-LLM")] = None
    gated_features: Annotated[Any, Only((None, {}), "it reaches into TensorRT-LLM")] = None


class TrussTrtLlm(Options):
    inference_stack: Annotated[Literal["v1"], Translated("which of Truss's two forms this is")] = "v1"
    build: Annotated[TrussBuild, Translated("see its fields")]
    runtime: Annotated[TrussRuntime, BeforeValidator(empty_section), Translated("see its fields")] = Field(
        default_factory=TrussRuntime
    )
    version_overrides: Annotated[Any, NoEffect("it names versions of Truss's own components")] = None


class TrussTrtLlmV2(Options):
    inference_stack: Annotated[Literal["v2"], Translated("which of Truss's two forms this is")]
    build: Annotated[TrussBuildV2, Translated("see its fields")]
    runtime: Annotated[TrussRuntimeV2, BeforeValidator(empty_section), Translated("see its fields")] = Field(
        default_factory=TrussRuntimeV2
    )
    version_overrides: Annotated[Any, NoEffect("it names versions of Truss's own components")] = None


class TrussResources(Options):
    accelerator: Annotated[Text | None, Translated("checked as Truss does; the machine at hand is used")] = None
    cpu: Annotated[Any, NoEffect("the machine at hand is used; see `build.num_threads`")] = None
    memory: Annotated[Any, NoEffect("the machine at hand is used; see `runtime.kv_cache_bytes`")] = None
    use_gpu: Annotated[Any, NoEffect("the machine at hand is used; see `device`")] = None
    node_count: Annotated[Integer | None, Field(ge=1), Only((None, 1), ONE_DEVICE)] = None
    instance_type: Annotated[Any, PLATFORM] = None


class _TrussFile(Options):
    """The top level around `trt_llm`."""

    model_name: Annotated[Text | None, Translated("`served_model_name`, unless `trt_llm.runtime` gives one")] = None
    model_metadata: Annotated[Any, Translated("tags are checked; the rest describes the model to people")] = None
    resources: Annotated[TrussResources, BeforeValidator(empty_section), Translated("see its fields")] = Field(
        default_factory=TrussResources
    )
    python_version: Annotated[Any, NoEffect("the engine runs in Paceline's own environment")] = None
    requirements: Annotated[Any, NoEffect("the engine runs in Paceline's own environment")] = None
    requirements_file: Annotated[Any, NoEffect("the engine runs in Paceline's own environment")] = None
    system_packages: Annotated[Any, NoEffect("the engine runs in Paceline's own environment")] = None
    environment_variables: Annotated[Any, NoEffect("the environment is that of the process")] = None
    base_image: Annotated[Any, NoEffect("no container is built")] = None
    build_commands: Annotated[Any, NoEffect("no container is built")] = None
    docker_server: Annotated[Any, NoEffect("no container is built")] = None
    secrets: Annotated[Any, NoEffect("the hub token is read from the environment (`HF_TOKEN`)")] = None
    description: Annotated[Any, NoEffect("it describes the model to people")] = None
    examples_filename: Annotated[Any, PLATFORM] = None
    runtime: Annotated[Any, PLATFORM] = None
    build: Annotated[Any, PLATFORM] = None
    train: Annotated[Any, PLATFORM] = None
    model_cache: Annotated[Any, PLATFORM] = None
    hf_cache: Annotated[Any, PLATFORM] = None
    cache_internal: Annotated[Any, PLATFORM] = None
    weights: Annotated[Any, PLATFORM] = None
    external_data: Annotated[Any, PLATFORM] = None
    training_checkpoints: Annotated[Any, PLATFORM] = None
    live_reload: Annotated[Any, PLATFORM] = None
    apply_library_patches: Annotated[Any, PLATFORM] = None
    spec_version: Annotated[Any, PLATFORM] = None
    use_local_src: Annotated[Any, PLATFORM] = None
    data_dir: Annotated[Any, OWN_CODE] = None
    input_type: Annotated[Any, OWN_CODE] = None
    bundled_packages_dir: Annotated[Any, OWN_CODE] = None
    external_package_dirs: Annotated[Any, OWN_CODE] = None
    model_framework: Annotated[Any, OWN_CODE] = None
    model_type: Annotated[Any, OWN_CODE] = None
    model_module_dir: Annotated[Any, OWN_CODE] = None
    model_class_filename: Annotated[Any, OWN_CODE] = None
    model_class_name: Annotated[Any, OWN_CODE] = None


class TrussFile(_TrussFile):
    trt_llm: Annotated[TrussTrtLlm, Translated("see its fields")]


class TrussFileV2(_TrussFile):
    trt_llm: Annotated[TrussTrtLlmV2, Translated("see its fields")]
