"""Translate the Truss `trt_llm` form into our options: rules, leniency, and a note for whatever has no effect here.

Follows truss 0.10 (each rule says what it mirrors), with the leniency of 0.9.57: runtime fields found under `build`
are moved. Knows both vocabularies and no files; field by field tables are in `truss_schema.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from paceline.config.problems import Problem, problems_of, shown
from paceline.config.schema import MAX_DRAFT_TOKENS, Config, Options
from paceline.config.truss_schema import (
    MARKS,
    Becomes,
    NoEffect,
    Only,
    TrussBuild,
    TrussCheckpoint,
    TrussFile,
    TrussFileV2,
    TrussModelBuild,
    TrussRuntime,
    TrussSpeculator,
)

ACCELERATORS = (
    "T4", "L4", "A10G", "V100", "A100", "A100_40GB", "H100", "H100_40GB", "H200", "B200", "B300", "GB300", "L40S",
    "RTX_PRO_6000",
)  # fmt: skip
WITHOUT_TENSORRT_LLM = ("T4", "V100")
WITHOUT_FP8 = ("A10G", "A100", "A100_40GB")
WITH_FP4 = ("B200", "B300", "GB300", "RTX_PRO_6000")
OPENAI_TAG = "openai-compatible"
LEGACY_TAG = "force-legacy-api-non-openai-compatible"
TRUSS_MAX_NUM_TOKENS = 8192  # Truss's default
LARGE_SPECULATIVE_BATCH = 64  # Truss warns above
LONG_LOOKAHEAD = 512  # Truss warns above

BUILD, RUNTIME, SPECULATOR = "trt_llm.build", "trt_llm.runtime", "trt_llm.build.speculator"


@dataclass(frozen=True)
class Note:
    """Something a reader of the config should know: a field without effect (note), or a doubtful one (warning)."""

    path: str
    message: str
    is_warning: bool = False

    def __str__(self) -> str:
        return f"`{self.path}` {self.message}"


@dataclass
class Translation:
    """`tree` is in our form; `spelled` maps each path of it to the Truss path that set it. Void if `problems`."""

    tree: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def put(self, path: str, value: Any, spelled: str) -> None:
        *sections, name = path.split(".")
        here = self.tree
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = value
        self.spelled[path] = spelled

    def note(self, path: str, message: str, is_warning: bool = False) -> None:
        self.notes.append(Note(path, message, is_warning))

    def refuse(self, path: str, message: str, hint: str) -> None:
        self.problems.append(Problem(path, message, hint))


def is_truss(tree: Any) -> bool:
    """Whether a parsed file is in the Truss form: it has a `trt_llm` block."""
    return isinstance(tree, dict) and "trt_llm" in tree


def translate_truss(tree: dict[Any, Any], where: Callable[[str], str | None] = lambda path: None) -> Translation:
    """Translate a parsed Truss file. Problems are collected in the result; `where` places a Truss path in its file."""
    result = Translation()
    trt_llm = tree["trt_llm"]
    if isinstance(trt_llm, dict) and ("target" in trt_llm or "draft" in trt_llm):
        result.refuse("trt_llm.target", "is the form of truss 0.9.55", "Write the draft as `trt_llm.build.speculator`.")
        return result
    is_v2 = isinstance(trt_llm, dict) and trt_llm.get("inference_stack") == "v2"
    model = TrussFileV2 if is_v2 else TrussFile
    try:
        file = model.model_validate(tree if is_v2 else _move_runtime_fields(tree, result))
    except ValidationError as error:
        result.problems = [_explain_native(problem) for problem in problems_of(error, model, where)]
        return result
    _apply_marks(file, result)
    _translate_top_level(file, result)
    _translate_model(file.trt_llm.build, result)
    if isinstance(file, TrussFile):
        _check_plugins(file.trt_llm.build, file.trt_llm.runtime, result)
        _translate_runtime(file.trt_llm.runtime, file.trt_llm.build, result)
        if file.trt_llm.build.speculator is not None:
            _translate_speculator(file.trt_llm.build, file.trt_llm.build.speculator, result)
    result.problems = [
        Problem(problem.path, problem.message, problem.hint, where(problem.path)) for problem in result.problems
    ]
    return result


def _explain_native(problem: Problem) -> Problem:
    if problem.path in Config.model_fields and problem.message == "is not an option":
        hint = "It is an option of Paceline's own form; a file with `trt_llm` is in the Truss form throughout."
        return Problem(problem.path, "does not go with `trt_llm`", hint, problem.where)
    return problem


def _move_runtime_fields(tree: dict[Any, Any], result: Translation) -> dict[Any, Any]:
    """Move runtime fields found under `build` to `runtime`, as truss 0.9.57 does. What `runtime` says itself wins."""
    trt_llm = tree["trt_llm"]
    build = trt_llm.get("build") if isinstance(trt_llm, dict) else None
    runtime = (trt_llm.get("runtime") or {}) if isinstance(trt_llm, dict) else None
    if not isinstance(build, dict) or not isinstance(runtime, dict):
        return tree
    moved = {
        name: build[name]
        for name in TrussRuntime.model_fields
        if name in build and name not in TrussBuild.model_fields and not name.startswith("lora_")
    }
    for name in moved:
        kept = f"; the value of `{RUNTIME}.{name}` is used" if name in runtime else ""
        result.note(f"{BUILD}.{name}", f"belongs under `{RUNTIME}` and was moved there{kept}", is_warning=True)
    build = {name: value for name, value in build.items() if name not in moved}
    return {**tree, "trt_llm": {**trt_llm, "build": build, "runtime": {**moved, **runtime}}}


def _given(model: Options, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, mark, value) of every field a file sets, sections before their fields, nothing below a NoEffect."""
    for name, info in type(model).model_fields.items():
        if name not in model.model_fields_set:
            continue
        value, path = getattr(model, name), f"{prefix}{name}"
        mark = next(item for item in info.metadata if isinstance(item, MARKS))
        yield path, mark, value
        if isinstance(value, Options) and not isinstance(mark, NoEffect):
            yield from _given(value, f"{path}.")


def _apply_marks(file: Options, result: Translation) -> None:
    """Do what the fields' marks say, for the whole file. A draft's own build block only keeps its notes."""
    for path, mark, value in _given(file):
        if isinstance(mark, Only) and value not in mark.values:
            allowed = " or ".join(shown(item) for item in mark.values if item not in (None, {}))
            result.refuse(
                path,
                f"must be {allowed}, got {shown(value)}" if allowed else f"cannot be honoured, got {shown(value)}",
                f"{mark.why[:1].upper()}{mark.why[1:]}.",
            )
        elif isinstance(mark, NoEffect) and value not in (None, [], {}, ""):
            result.note(path, f"has no effect here: {mark.why}")
        elif isinstance(mark, Becomes) and value is not None:
            if path.startswith(f"{SPECULATOR}."):
                result.note(path, f"has no effect here: the draft takes the target's `{mark.path}`")
            else:
                result.put(mark.path, value, path)


def _translate_top_level(file: TrussFile | TrussFileV2, result: Translation) -> None:
    if file.model_name is not None and "served_model_name" not in result.tree:
        result.put("served_model_name", file.model_name, "model_name")
    _check_accelerator(file, result)
    if file.model_metadata is None:
        return
    result.note("model_metadata", "has no effect here: it describes the model to people")
    tags = file.model_metadata.get("tags") if isinstance(file.model_metadata, dict) else None
    if not isinstance(tags, list) or LEGACY_TAG not in tags:
        return
    if OPENAI_TAG in tags:
        result.refuse("model_metadata.tags", f"has both `{OPENAI_TAG}` and `{LEGACY_TAG}`", f"Keep `{OPENAI_TAG}`.")
    else:
        result.refuse(
            "model_metadata.tags", f"asks for the legacy API (`{LEGACY_TAG}`)", "Only the OpenAI API is served."
        )


def _check_accelerator(file: TrussFile | TrussFileV2, result: Translation) -> None:
    """Mirror Truss's hardware rules, though the engine runs on the machine at hand, so that a file stays portable."""
    text, path = file.resources.accelerator, "resources.accelerator"
    if text is None:
        return
    match = re.fullmatch(r"([A-Z0-9_]+)(?::([0-9]{1,4}))?", text)
    if match is None or match[1] not in ACCELERATORS or int(match[2] or 1) < 1:
        known = ", ".join(ACCELERATORS)
        result.refuse(path, f"must be NAME or NAME:COUNT, got {shown(text)}", f"Truss knows {known}.")
        return
    result.note(path, "has no effect here: the machine at hand is used; see `device`")
    name, count = match[1], int(match[2] or 1)
    build = file.trt_llm.build
    parallel = build.tensor_parallel_count * build.pipeline_parallel_count * build.sequence_parallel_count \
        if isinstance(build, TrussBuild) else file.trt_llm.runtime.tensor_parallel_size  # fmt: skip
    if parallel != count:
        result.refuse(
            path,
            f"has {count} devices, but the parallel counts multiply to {parallel}",
            f"The engine runs on one device: write `{name}`.",
        )
    quantization = build.quantization_type
    if name in WITHOUT_TENSORRT_LLM:
        result.refuse(path, f"cannot run TensorRT-LLM, got {shown(text)}", "Truss refuses it too; remove the line.")
    elif name in WITHOUT_FP8 and quantization.startswith("fp8"):
        result.refuse(f"{BUILD}.quantization_type", f"{quantization} does not run on {name}", "Truss refuses it too.")
    elif name not in WITH_FP4 and quantization.startswith("fp4"):
        result.refuse(
            f"{BUILD}.quantization_type", f"{quantization} needs {', '.join(WITH_FP4)}, got {name}", "Use no_quant."
        )


def _translate_model(build: Any, result: Translation) -> None:
    _put_reference("model", build.checkpoint_repository, f"{BUILD}.checkpoint_repository", result)
    _check_base_model(build, BUILD, result)
    _put_quantization("quantization", build, BUILD, result)


def _check_base_model(build: Any, path: str, result: Translation) -> None:
    base_model = getattr(build, "base_model", "decoder")
    if base_model in ("encoder", "encoder_bert", "whisper"):
        result.refuse(f"{path}.base_model", f"must be a decoder, got {base_model}", "Only text generation is served.")


def _put_reference(option: str, checkpoint: TrussCheckpoint, path: str, result: Translation) -> None:
    if checkpoint.source not in ("HF", "LOCAL"):
        result.refuse(
            f"{path}.source",
            f"must be `HF` or `LOCAL`, got `{checkpoint.source}`",
            "Download the checkpoint and give its directory with `source: LOCAL`.",
        )
        return
    result.put(f"{option}.repo", checkpoint.repo, f"{path}.repo")
    result.put(f"{option}.source", "hub" if checkpoint.source == "HF" else "local", f"{path}.source")
    if checkpoint.revision is not None:
        result.put(f"{option}.revision", checkpoint.revision, f"{path}.revision")


def _put_quantization(option: str, build: Any, path: str, result: Translation) -> None:
    """An absent type leaves ours to `auto`; Truss's default is no_quant only because it cannot measure."""
    if "quantization_type" not in build.model_fields_set:
        return
    kind, path = build.quantization_type, f"{path}.quantization_type"
    result.put(option, "bf16" if kind == "no_quant" else "int8", path)
    if kind == "no_quant":
        result.note(path, "no_quant is bf16 here")
        return
    narrow = kind.startswith(("fp4", "weights_int4"))
    size = "no narrower format is built, so weights take twice the bytes" if narrow else "of the same size per weight"
    cache = "; the KV cache stays bf16" if "kv" in kind else ""
    result.note(path, f"{kind} is int8 here, {size}{cache}")


def _check_plugins(build: TrussBuild, runtime: TrussRuntime, result: Translation) -> None:
    """Truss's rules on paged attention, in its order of importance; one problem at most."""
    plugins, path = build.plugin_configuration, f"{BUILD}.plugin_configuration"
    both = plugins.paged_kv_cache and plugins.use_paged_context_fmha
    missing = "use_paged_context_fmha" if plugins.paged_kv_cache else "paged_kv_cache"
    if build.speculator is not None and not both:
        result.refuse(f"{path}.{missing}", "must be `true` with a speculator, got false", "Remove the line.")
    elif plugins.use_paged_context_fmha and not plugins.paged_kv_cache:
        result.refuse(
            f"{path}.paged_kv_cache", "must be `true` with `use_paged_context_fmha`, got false", "Remove the line."
        )
    elif runtime.enable_chunked_context and not both:
        result.refuse(
            f"{path}.{missing}", "must be `true` with chunked context, got false",
            f"Remove the line, or set `{RUNTIME}.enable_chunked_context: false`.",
        )  # fmt: skip
    elif plugins.use_fp8_context_fmha and not (both and build.quantization_type in ("fp8_kv", "fp4_kv")):
        result.refuse(
            f"{path}.use_fp8_context_fmha", "needs `use_paged_context_fmha` and `quantization_type: fp8_kv`, got true",
            "Remove the line.",
        )  # fmt: skip
    if plugins.use_fp8_context_fmha:
        result.note(f"{path}.use_fp8_context_fmha", "has no effect here: attention runs in bf16")
    if not plugins.use_paged_context_fmha:
        result.put("runtime.enable_prefix_cache", False, f"{path}.use_paged_context_fmha")
    if not plugins.paged_kv_cache:
        result.note(f"{path}.paged_kv_cache", "has no effect here: the KV cache is always paged")


def _translate_runtime(runtime: TrussRuntime, build: TrussBuild, result: Translation) -> None:
    if "total_token_limit" in runtime.model_fields_set:
        path, limit = f"{RUNTIME}.total_token_limit", runtime.total_token_limit
        if limit == 0:
            result.refuse(path, "must be -1 (no limit) or at least 1, got 0", "No request could run.")
        result.put("runtime.total_token_limit", None if limit == -1 else limit, path)
    if not runtime.enable_chunked_context and "max_num_tokens" not in build.model_fields_set:
        path = f"{RUNTIME}.enable_chunked_context"
        result.put("build.max_num_tokens", TRUSS_MAX_NUM_TOKENS, path)
        result.note(path, f"sets `build.max_num_tokens` to Truss's default, {TRUSS_MAX_NUM_TOKENS}: prompts run whole")


def _translate_speculator(build: TrussBuild, speculator: TrussSpeculator, result: Translation) -> None:
    if build.max_batch_size > LARGE_SPECULATIVE_BATCH and "max_batch_size" in build.model_fields_set:
        result.note(
            f"{BUILD}.max_batch_size",
            f"above {LARGE_SPECULATIVE_BATCH} leaves speculation little to gain, got {build.max_batch_size}",
            is_warning=True,
        )
    if speculator.speculative_decoding_mode == "LOOKAHEAD_DECODING":
        _translate_lookahead(speculator, result)
    else:
        _translate_external(speculator, result)


def _translate_external(speculator: TrussSpeculator, result: Translation) -> None:
    """A draft model. The method stays `auto`: the builder measures the draft model, alone and with the suffix index."""
    repository, draft_build = speculator.checkpoint_repository, speculator.build
    if repository is not None and draft_build is not None:
        result.refuse(SPECULATOR, "has both `checkpoint_repository` and `build`", "Keep exactly one of them.")
    elif repository is not None:
        _put_reference("speculation.draft", repository, f"{SPECULATOR}.checkpoint_repository", result)
    elif draft_build is not None:
        _translate_draft_build(draft_build, result)
    else:
        result.refuse(SPECULATOR, "has neither `checkpoint_repository` nor `build`", "Name the draft model in one.")
    if speculator.num_draft_tokens is None:
        result.refuse(
            f"{SPECULATOR}.num_draft_tokens", "is missing", f"Give it a whole number from 1 to {MAX_DRAFT_TOKENS}."
        )
    else:
        result.put("speculation.num_draft_tokens", speculator.num_draft_tokens, f"{SPECULATOR}.num_draft_tokens")
    for name in ("lookahead_windows_size", "lookahead_ngram_size", "lookahead_verification_set_size"):
        if getattr(speculator, name) is not None:
            result.refuse(
                f"{SPECULATOR}.{name}", "needs `speculative_decoding_mode: LOOKAHEAD_DECODING`", "Remove the line."
            )


def _translate_draft_build(build: TrussModelBuild, result: Translation) -> None:
    path = f"{SPECULATOR}.build"
    _check_base_model(build, path, result)
    _put_reference("speculation.draft", build.checkpoint_repository, f"{path}.checkpoint_repository", result)
    _put_quantization("build.draft_quantization", build, path, result)
    if "plugin_configuration" in build.model_fields_set:
        result.note(f"{path}.plugin_configuration", "has no effect here: the draft takes the target's")


def _translate_lookahead(speculator: TrussSpeculator, result: Translation) -> None:
    """Lookahead decoding becomes the suffix drafter: both draft n-grams without a second model."""
    sizes = {
        name: getattr(speculator, name)
        for name in ("lookahead_windows_size", "lookahead_ngram_size", "lookahead_verification_set_size")
    }
    for name in [name for name, size in sizes.items() if size is None]:
        result.refuse(f"{SPECULATOR}.{name}", "is needed by LOOKAHEAD_DECODING", "Give all three lookahead sizes.")
    for name in ("checkpoint_repository", "build"):
        if getattr(speculator, name) is not None:
            result.refuse(f"{SPECULATOR}.{name}", "is never used by LOOKAHEAD_DECODING", "Remove it, or use a draft.")
    if None in sizes.values():
        return
    computed = lookahead_draft_length(*sizes.values())
    num_draft_tokens = computed if speculator.num_draft_tokens is None else speculator.num_draft_tokens
    path = f"{SPECULATOR}.num_draft_tokens"
    if num_draft_tokens < computed:
        result.refuse(
            path, f"must be at least {computed} for these lookahead sizes, got {num_draft_tokens}", "Remove the line."
        )
    elif num_draft_tokens > MAX_DRAFT_TOKENS:
        result.refuse(path, f"must be at most {MAX_DRAFT_TOKENS}, got {num_draft_tokens}", "Use smaller sizes.")
    elif num_draft_tokens > LONG_LOOKAHEAD:
        result.note(path, f"above {LONG_LOOKAHEAD} rarely pays, got {num_draft_tokens}", is_warning=True)
    mode = f"{SPECULATOR}.speculative_decoding_mode"
    result.put("speculation.method", "suffix", mode)
    result.put("speculation.num_draft_tokens", num_draft_tokens, mode if speculator.num_draft_tokens is None else path)
    result.note(
        mode,
        f"LOOKAHEAD_DECODING is served by the suffix drafter, up to {num_draft_tokens} tokens per round; unlike "
        "lookahead it takes every sampling parameter",
    )


def lookahead_draft_length(windows: int, ngram: int, verification_set: int) -> int:
    """Draft tokens that lookahead decoding with these sizes verifies at once, as TensorRT-LLM counts them."""
    return (0 if ngram == 1 else ngram - 2) + (windows - 1 + verification_set) * (ngram - 1)
