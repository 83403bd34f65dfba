"""The only place where names become objects: from a config to an engine folder, from an engine folder to an Engine.

Knows every part of the product; everything it returns is ready to use and knows nothing of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tokenizers
import torch

from paceline.build import autotune
from paceline.build.builder import load_weights
from paceline.build.manifest import TEMPLATE, TOKENIZER, Manifest, read_manifest, read_small_file
from paceline.build.resolve import Listener
from paceline.config import Config, Override, override_runtime
from paceline.errors import CapacityError, EngineFolderError
from paceline.runtime.backend import Backend
from paceline.runtime.backend_native import BLOCK_SIZE, ThreadPool
from paceline.runtime.backends import ModelWeights, block_bytes, open_backend, open_pool
from paceline.runtime.controller import FixedController
from paceline.runtime.drafting.drafter import Drafter
from paceline.runtime.drafting.hybrid import HybridDrafter
from paceline.runtime.drafting.model import ModelDrafter
from paceline.runtime.drafting.suffix import SuffixDrafter
from paceline.runtime.engine import Engine, EngineLimits
from paceline.runtime.kv_cache import KVCache
from paceline.runtime.sampling import SamplingKernels, TorchSamplingKernels
from paceline.runtime.sampling_native import NativeSamplingKernels
from paceline.runtime.speedup import CostTable, cheapest_num_rows
from paceline.runtime.verify import Verifier

DEFAULT_CACHE_TOKENS = 65_536


@dataclass(frozen=True)
class OpenEngine:
    """An engine ready to run, with what its callers need besides: manifest, tokenizer and chat template."""

    engine: Engine
    manifest: Manifest
    config: Config
    tokenizer: tokenizers.Tokenizer
    chat_template: str | None
    target: Backend
    draft: Backend | None
    kv_cache_bytes: int  # once it is full; until then, what is used

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.target.num_blocks * self.target.block_size


def open_engine(
    folder: Path,
    *,
    config: Config | None = None,
    speculation: bool = True,
    prefix_cache: bool = True,
    seed: int | None = None,
    listener: Listener | None = None,
) -> OpenEngine:
    """Open an engine folder. `config` overrides the runtime options it was built with; `speculation` False leaves the
    drafters out; `prefix_cache` False lets no request profit from another's prompt, whatever the config says; `seed`
    fixes the randomness of requests that bring no seed of their own.

    Raises EngineFolderError for a damaged folder and CapacityError when the memory asked for is not there.
    """
    listener = listener or Listener()
    manifest = read_manifest(folder)
    config = config or Config.model_validate(manifest.config)
    if not prefix_cache:
        runtime = config.runtime.model_copy(update={"enable_prefix_cache": False})
        config = config.model_copy(update={"runtime": runtime})
    tokenizer = _tokenizer(folder, manifest)
    machine = autotune.this_machine()
    if machine.fingerprint != manifest.machine.fingerprint:
        listener.say(
            f"warning: this engine was tuned on another CPU ({manifest.machine.cpu}); build it again with --retune to "
            "measure this one."
        )
    on_gpu = manifest.kernels.name == "torch" and config.device != "cpu" and torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    with_draft = speculation and manifest.draft is not None and manifest.method in ("draft", "hybrid")
    records = {"target": manifest.target} | ({"draft": manifest.draft} if with_draft else {})
    weights = {role: load_weights(folder, role, record) for role, record in records.items()}
    pool = _pool(manifest, machine, listener)
    backends = _backends(manifest, config, weights, pool, device)
    kernels = NativeSamplingKernels(pool) if pool else TorchSamplingKernels()
    engine = _engine(manifest, config, tokenizer, backends, kernels, speculation, seed)
    template = read_small_file(folder, TEMPLATE, manifest)
    cache_bytes = backends["target"].num_blocks * _block_bytes(manifest, weights)
    return OpenEngine(
        engine, manifest, config, tokenizer, template, backends["target"], backends.get("draft"), cache_bytes
    )


def runtime_config(folder: Path, overrides: SequenceOf[Override | str]) -> Config:
    """The config of an engine folder under overrides of what may change per start. Raises ConfigError for others."""
    return override_runtime(read_manifest(folder).config, overrides)


def _tokenizer(folder: Path, manifest: Manifest) -> tokenizers.Tokenizer:
    text = read_small_file(folder, TOKENIZER, manifest)
    if text is None:
        raise EngineFolderError(f"`{folder}` has no {TOKENIZER}", hint="build the engine again.")
    return tokenizers.Tokenizer.from_str(text)


def _pool(manifest: Manifest, machine: autotune.Machine, listener: Listener) -> ThreadPool | None:
    num_threads = min(manifest.kernels.num_threads, machine.num_cores)
    is_native = manifest.kernels.name == "native"
    pool = open_pool(None, num_threads, listener.say) if is_native else None
    if pool is None:
        torch.set_num_threads(num_threads)
    if is_native and pool is None:
        listener.say(
            "warning: no C++ compiler was found, so the PyTorch kernels run instead, many times slower; install g++ or "
            "clang, or set CXX."
        )
    return pool


def _kv_dtype(quantization: str) -> torch.dtype:
    return torch.float32 if quantization == "float32" else torch.bfloat16


def _block_bytes(manifest: Manifest, weights: Mapping[str, ModelWeights]) -> int:
    """Bytes of one KV block of all models together."""
    kv_dtype = _kv_dtype(manifest.target.quantization)
    return sum(block_bytes(model.architecture, kv_dtype) for model in weights.values())


def _backends(
    manifest: Manifest, config: Config, weights: Mapping[str, ModelWeights], pool: ThreadPool | None, device: str
) -> dict[str, Backend]:
    """Open each model with as many KV blocks as the memory allows and the limits can use."""
    kv_dtype = _kv_dtype(manifest.target.quantization)
    per_block = _block_bytes(manifest, weights)
    free = torch.cuda.mem_get_info()[0] if device == "cuda" else psutil.virtual_memory().available
    budget = _cache_budget(config, free, per_block, manifest.max_seq_len)
    useful_tokens = config.build.max_batch_size * manifest.max_seq_len
    if config.runtime.total_token_limit is not None:
        useful_tokens = min(useful_tokens, max(config.runtime.total_token_limit, manifest.max_seq_len))
    num_blocks = min(budget // per_block, -(-useful_tokens // BLOCK_SIZE) + config.build.max_batch_size)
    if budget > free or num_blocks * BLOCK_SIZE < manifest.max_seq_len:
        need = -(-manifest.max_seq_len // BLOCK_SIZE) * per_block
        raise CapacityError(
            f"the KV cache may take {_size(budget)} of the {_size(free)} free, and one sequence of "
            f"`max_seq_len` ({manifest.max_seq_len}) needs {_size(need)}",
            hint="lower `max_seq_len`, or change `runtime.kv_cache_bytes` or `runtime.kv_cache_free_mem_fraction`.",
        )
    return {
        role: open_backend(
            model,
            pool=pool,
            device=device,
            num_blocks=num_blocks,
            max_rows=config.build.max_num_tokens,
            max_seq_len=manifest.max_seq_len,
            kv_dtype=kv_dtype,
        )
        for role, model in weights.items()
    }


def _cache_budget(config: Config, free_bytes: int, block_bytes: int, max_seq_len: int) -> int:
    """Bytes that the KV caches may take. Memory is touched as it is used, and in time prefixes fill all there is: the
    default is therefore what a small server needs, not what the machine has."""
    runtime = config.runtime
    if runtime.kv_cache_bytes is not None:
        return runtime.kv_cache_bytes
    if runtime.kv_cache_free_mem_fraction is not None:
        return int(free_bytes * runtime.kv_cache_free_mem_fraction)
    num_blocks = -(-max(DEFAULT_CACHE_TOKENS, max_seq_len) // BLOCK_SIZE)
    return min(free_bytes // 2, num_blocks * block_bytes)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _engine(
    manifest: Manifest,
    config: Config,
    tokenizer: tokenizers.Tokenizer,
    backends: Mapping[str, Backend],
    kernels: SamplingKernels,
    speculation: bool,
    seed: int | None,
) -> Engine:
    eos = frozenset(manifest.eos_token_ids)
    generators = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2)]
    drafters: dict[str, Drafter] = {}
    if speculation and manifest.method is not None:
        drafters = _drafters(manifest, config, backends, kernels, generators[1])
    limits = EngineLimits(
        max_seq_len=manifest.max_seq_len,
        max_batch_size=config.build.max_batch_size,
        max_num_tokens=config.build.max_num_tokens,
        total_token_limit=config.runtime.total_token_limit,
        request_default_max_tokens=config.runtime.request_default_max_tokens,
        enable_chunked_prefill=config.runtime.enable_chunked_context,
        scheduler_policy=config.runtime.batch_scheduler_policy,
        enable_prefix_cache=config.runtime.enable_prefix_cache,
    )
    return Engine(
        backend=backends["target"],
        tokenizer=tokenizer,
        limits=limits,
        drafters=drafters,
        default_method=manifest.method if drafters else None,
        controller=FixedController(manifest.num_draft_tokens, cheapest_num_rows(CostTable(manifest.costs.target)) - 1),
        verifier=Verifier(kernels, generators[0], eos),
        eos_token_ids=eos,
    )


def _drafters(
    manifest: Manifest,
    config: Config,
    backends: Mapping[str, Backend],
    kernels: SamplingKernels,
    generator: np.random.Generator,
) -> dict[str, Drafter]:
    """Every drafter this engine can run, by method, so that a request may choose another than the default."""
    options = config.speculation.suffix
    suffix = SuffixDrafter(options.max_corpus_tokens, options.min_match)
    drafters: dict[str, Drafter] = {"suffix": suffix}
    if "draft" in backends:
        backend = backends["draft"]
        cache = KVCache(
            backend.num_blocks, backend.block_size, backend.copy_block, config.runtime.enable_prefix_cache
        )
        model = ModelDrafter(
            backend, kernels, cache, manifest.max_seq_len, manifest.target.vocab_size, generator, manifest.eos_token_ids
        )
        costs = CostTable(manifest.costs.target, manifest.costs.draft.get(1, 0.0))
        drafters |= {"draft": model, "hybrid": HybridDrafter(suffix, model, costs)}
    return drafters


def summary(opened: OpenEngine) -> dict[str, Any]:
    """What an engine is, in a few JSON-ready facts."""
    manifest = opened.manifest
    return {
        "model": manifest.served_model_name,
        "target": manifest.target.source,
        "draft": manifest.draft.source if manifest.draft else None,
        "quantization": manifest.target.quantization,
        "method": manifest.method,
        "num_draft_tokens": manifest.num_draft_tokens,
        "max_seq_len": manifest.max_seq_len,
        "kernels": manifest.kernels.name,
        "num_threads": manifest.kernels.num_threads,
    }
