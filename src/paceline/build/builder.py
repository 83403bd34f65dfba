"""Builds an engine folder: resolve, check, quantise, measure, write, rename once.

Work happens in a hidden neighbour of the output (`.NAME.building`). What is finished there is kept when a build is
interrupted, so that running the same build again resumes it; the output appears in one rename. Knows checkpoints,
quantisation and measurement; knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import paceline
from paceline.build import autotune
from paceline.build.compatibility import tokenizer_size
from paceline.build.manifest import (
    DRAFT,
    FILES,
    FORMAT_VERSION,
    MANIFEST,
    TARGET,
    TEMPLATE,
    TOKENIZER,
    Choice,
    Costs,
    Kernels,
    Manifest,
    ModelRecord,
    architecture_record,
    check_files,
    read_manifest,
    write_manifest,
    write_whole,
)
from paceline.build.quantize import MAX_WEIGHT_ERROR, activation_group, quantize_model
from paceline.build.resolve import Listener, Resolved, resolve
from paceline.build.tensor_file import read_tensors, write_tensors
from paceline.checkpoints.checkpoint import Checkpoint
from paceline.config.schema import Config
from paceline.errors import BuildError, EngineFolderError
from paceline.runtime.backend_native import BLOCK_SIZE
from paceline.runtime.backends import ModelWeights, open_backend, open_pool

_SPARE_BYTES = 64 << 20
# What a workspace has besides the engine's files.
_WORK_FILES = frozenset({"key", "target.json", "draft.json", "lock"})


def build_engine(config: Config, output: Path, listener: Listener | None = None, retune: bool = False) -> Manifest:
    """Build `config` into the folder `output` and return its manifest. Instant if that very engine is there already.

    Raises a PacelineError for anything the user can mend. `retune` measures an existing engine's costs again.
    """
    listener = listener or Listener()
    resolved = resolve(config, listener)
    for warning in resolved.warnings:
        listener.say(f"warning: {warning}")
    output = output.resolve()
    try:
        finished = _finished(output, resolved, listener)
        if finished:
            return _retuned(output, resolved, finished, listener) if retune else _renewed(output, resolved, finished)
        work = output.with_name(f".{output.name}.building")
        with _workspace(work, output, resolved):
            records = _write_models(work, resolved, listener)
            files = _write_texts(work, resolved)
            manifest = _measure(work, resolved, records, files, listener)
            write_manifest(work, manifest)
            _publish(work, output)
    except OSError as error:
        where = f" (`{error.filename}`)" if error.filename else ""
        raise BuildError(
            f"building `{output}` stopped: {error.strerror or error}{where}",
            hint="free space or choose another output folder; then run the same build again: it resumes where it "
            "stopped."
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "choose an output folder that can be created and written here.",
        ) from error
    return manifest


def _finished(output: Path, resolved: Resolved, listener: Listener) -> Manifest | None:
    """The manifest of `output` if it already is this engine. Raises BuildError where it is something else."""
    if not output.exists():
        return None
    names = {file.name for file in output.iterdir()} if output.is_dir() else {output.name}
    foreign = sorted(name for name in names - FILES - _WORK_FILES if not name.endswith(".part"))
    if foreign or (names and MANIFEST not in names):
        found = f"holds `{foreign[0]}`" if output.is_dir() and foreign else f"has no {MANIFEST}"
        raise BuildError(
            f"`{output}` exists and is not an engine: it {found}",
            hint="choose another output folder, or remove it yourself.",
        )
    try:
        manifest = read_manifest(output)
        check_files(output, manifest)
    except EngineFolderError as error:
        if names:
            listener.say(f"replacing `{output}`: {error.message}")
        return None
    if manifest.key != resolved.key:
        listener.say(f"`{output}` holds another engine, which will be replaced")
        return None
    if manifest.machine.fingerprint != autotune.this_machine().fingerprint:
        listener.say(
            f"warning: this engine was tuned on another CPU ({manifest.machine.cpu}); run the build with --retune to "
            "measure it here."
        )
    return manifest


def _renewed(output: Path, resolved: Resolved, manifest: Manifest) -> Manifest:
    """A finished engine with today's runtime options, which change nothing that was built."""
    current = {"config": resolved.config.model_dump(mode="json"), "served_model_name": resolved.served_model_name}
    if any(getattr(manifest, name) != value for name, value in current.items()):
        manifest = manifest.model_copy(update=current)
        write_manifest(output, manifest)
    return manifest


def _retuned(output: Path, resolved: Resolved, manifest: Manifest, listener: Listener) -> Manifest:
    """A finished engine measured again on this machine; its weights stay as they are."""
    records = {"target": manifest.target} | ({"draft": manifest.draft} if manifest.draft else {})
    manifest = _measure(output, resolved, records, manifest.files, listener, check=True)
    write_manifest(output, manifest)
    return manifest


@contextlib.contextmanager
def _workspace(work: Path, output: Path, resolved: Resolved) -> Iterator[None]:
    """The folder a build works in, held by a lock, emptied if it is another build's."""
    output.parent.mkdir(parents=True, exist_ok=True)
    work.mkdir(exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A build that just finished renamed the folder, and this lock with it: then the path is no longer there.
            (work / "lock").stat()
        except OSError as error:
            raise BuildError(f"another build of `{output}` is running", hint="wait for it, or stop it.") from error
        key_file = work / "key"
        if not key_file.exists() or key_file.read_text() != resolved.key:
            for leftover in work.iterdir():
                if leftover.name != "lock":
                    leftover.unlink()
            write_whole(key_file, resolved.key)
        have = sum(file.stat().st_size for file in work.glob("*.safetensors"))
        need = max(0, resolved.weight_bytes - have) + _SPARE_BYTES
        free = shutil.disk_usage(work).free
        if need > free:
            raise BuildError(
                f"building needs {need / 1e9:.2f} GB in `{output.parent}` and {free / 1e9:.2f} GB are free",
                hint="free some space or choose another output folder.",
            )
        yield


def _write_models(work: Path, resolved: Resolved, listener: Listener) -> dict[str, ModelRecord]:
    models = [("target", TARGET, resolved.target, resolved.quantization)]
    if resolved.draft:
        models.append(("draft", DRAFT, resolved.draft, resolved.draft_quantization))
    return {role: _write_model(work, role, *rest, resolved, listener) for role, *rest in models}


def _write_model(
    work: Path, role: str, name: str, checkpoint: Checkpoint, quantization: str, resolved: Resolved, listener: Listener
) -> ModelRecord:
    """Quantise one model into the workspace, or take over what an interrupted build finished."""
    done = work / f"{role}.json"
    if done.exists() and (work / name).exists():
        listener.say(f"resuming: the {role} is already quantised")
        return ModelRecord.model_validate_json(done.read_text())
    architecture = checkpoint.architecture
    vocab_size = tokenizer_size(checkpoint)
    if role == "draft":
        vocab_size = min(vocab_size, tokenizer_size(resolved.target))
    errors: dict[str, float] = {}
    total = 4 * architecture.num_layers + 1 + (not architecture.tie_word_embeddings)

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        seen = 0
        for tensor_name, tensor in quantize_model(
            architecture, checkpoint.tensors, quantization, vocab_size, errors.__setitem__
        ):
            yield tensor_name, tensor
            if tensor_name.endswith(".weight"):
                seen += 1
                listener.stage(f"quantise {role}", seen, total)

    part = work / f"{name}.part"
    digest = write_tensors(part, counted())
    os.replace(part, work / name)
    record = ModelRecord(
        source=checkpoint.source,
        digest=checkpoint.digest,
        architecture=architecture_record(architecture),
        num_parameters=checkpoint.num_parameters,
        vocab_size=vocab_size,
        quantization=quantization,
        activation_group=activation_group(architecture),
        weight_bytes=(work / name).stat().st_size,
        sha256=digest,
        weight_errors={layer: round(error, 6) for layer, error in errors.items()},
        kept_in_bf16=[layer for layer, error in errors.items() if error > MAX_WEIGHT_ERROR],
    )
    write_whole(done, record.model_dump_json())
    return record


def _write_texts(work: Path, resolved: Resolved) -> dict[str, str]:
    texts = {TOKENIZER: resolved.target.tokenizer_json}
    if resolved.target.chat_template is not None:
        texts[TEMPLATE] = resolved.target.chat_template
    for name, text in texts.items():
        (work / name).write_bytes(text.encode())
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def _measure(
    folder: Path,
    resolved: Resolved,
    records: dict[str, ModelRecord],
    files: dict[str, str],
    listener: Listener,
    check: bool = False,
) -> Manifest:
    """Tune and time what was written, choose, and put it all on record. `check` the weights if others could write."""
    build = resolved.config.build
    weights = {role: load_weights(folder, role, record, check) for role, record in records.items()}
    listener.stage("tune kernels", 0, 1)
    kernels, choices = autotune.choose_kernels(
        weights["target"], resolved.device, build.num_threads, build.autotune, listener.say
    )
    listener.stage("tune kernels", 1, 1)
    costs = _profile(resolved, weights, kernels, listener)
    method, num_draft_tokens, choice = _choose_speculation(resolved, costs)
    quantised = "; ".join(f"{role}: {record.quantization}" for role, record in records.items())
    kept = [layer for record in records.values() for layer in record.kept_in_bf16]
    worst = max((e for r in records.values() for e in r.weight_errors.values()), default=0.0)
    because = f"largest relative weight error {worst:.4f}, bound {MAX_WEIGHT_ERROR}; kept in bf16: {kept or 'none'}"
    choices += [choice, Choice(what="quantization", chosen=quantised, because=because)]
    target = resolved.target
    return Manifest(
        format_version=FORMAT_VERSION,
        paceline_version=paceline.__version__,
        key=resolved.key,
        served_model_name=resolved.served_model_name,
        config=resolved.config.model_dump(mode="json"),
        max_seq_len=resolved.max_seq_len,
        eos_token_ids=sorted(target.eos_token_ids),
        bos_token_id=target.bos_token_id,
        special_tokens=dict(target.special_tokens),
        default_sampling=dict(target.default_sampling),
        method=method,
        num_draft_tokens=num_draft_tokens,
        row_buckets=autotune.row_buckets(costs.target),
        target=records["target"],
        draft=records.get("draft"),
        kernels=kernels,
        machine=autotune.this_machine(),
        costs=costs,
        choices=choices,
        versions=_versions(),
        files=files,
    )


def _profile(resolved: Resolved, weights: dict[str, ModelWeights], kernels: Kernels, listener: Listener) -> Costs:
    pool = open_pool(kernels.compiler, kernels.num_threads, listener.say) if kernels.name == "native" else None
    rows = min(resolved.config.build.max_num_tokens, autotune.PREFILL[-1])
    length = autotune.CONTEXT + max(rows, autotune.ROWS[-1])
    backends = {
        role: open_backend(
            model, pool=pool, device=resolved.device, num_blocks=-(-length // BLOCK_SIZE) + 1,
            max_rows=max(rows, 16), max_seq_len=length + BLOCK_SIZE,
        )
        for role, model in weights.items()
    }  # fmt: skip
    return autotune.profile(
        backends["target"], backends.get("draft"), rows, lambda done, total: listener.stage("profile", done, total)
    )


def _choose_speculation(resolved: Resolved, costs: Costs) -> tuple[str | None, int, Choice]:
    options = resolved.config.speculation
    if resolved.method is None:
        return None, 0, Choice(what="speculation", chosen="off", because="set by `speculation`")
    if options.num_draft_tokens is not None:
        because = "set by `speculation.num_draft_tokens`"
        chosen = Choice(what="num_draft_tokens", chosen=str(options.num_draft_tokens), because=because)
        return resolved.method, options.num_draft_tokens, chosen
    count, gain, choice = autotune.choose_num_draft_tokens(costs, resolved.method)
    if options.method == "auto" and options.draft is not None and gain < autotune.MIN_GAIN:
        # The draft costs more than it can save on this machine: say so, and draft from the text instead.
        without = autotune.choose_num_draft_tokens(costs, "suffix")[0]
        because = f"with the draft model: {choice.because}, below {autotune.MIN_GAIN}"
        return "suffix", without, Choice(what="speculation", chosen="suffix, without the draft", because=because)
    return resolved.method, count, choice


def _publish(work: Path, output: Path) -> None:
    """Make the finished workspace the engine, in one rename; an engine in the way is removed only after it."""
    old = output.with_name(f".{output.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if output.exists():
        os.replace(output, old)
    os.replace(work, output)
    for file in output.iterdir():
        if file.name not in FILES:
            file.unlink()
    shutil.rmtree(old, ignore_errors=True)


def load_weights(folder: Path, role: str, record: ModelRecord, check: bool = True) -> ModelWeights:
    """Read one model's packed tensors. With `check`, the file must be the one the builder wrote."""
    tensors = read_tensors(folder / (TARGET if role == "target" else DRAFT), record.sha256 if check else None)
    return ModelWeights(record.to_architecture(), tensors, record.vocab_size, record.activation_group)


def _versions() -> dict[str, Any]:
    names = ("torch", "numpy", "tokenizers", "safetensors", "gguf")
    return {"python": sys.version.split()[0], **{name: version(name) for name in names}}
