"""The command line: data on stdout, talk on stderr, exit codes, and no traceback whatever is typed."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paceline
from engines import config_of
from paceline.cli import app as cli
from paceline.cli import console, generate

COMMANDS = ("check", "build", "presets", "generate")
PROGRAM = [sys.executable, "-m", "paceline.cli"]


class Ran:
    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def run(monkeypatch, capfd):
    """`run("check", ...)` runs `paceline check ...` in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def call(*arguments: object, stdin: bytes = b"") -> Ran:
        monkeypatch.setattr(sys, "argv", ["paceline", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capfd.readouterr()
        return Ran(exit_.value.code or 0, out, err)

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def config(tiny, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(yaml.safe_dump(config_of(tiny("llama")[0]).model_dump(mode="json", exclude_unset=True)))
    return path


@pytest.fixture(scope="module")
def engine(config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("engine") / "engine"
    subprocess.run([*PROGRAM, "build", str(config), "-o", str(folder)], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help(run, command):
    ran = run(*command, "--help")
    assert ran.code == 0 and "Usage: paceline" in ran.out and ran.err == ""


def test_version(run):
    assert run("--version").out == f"{paceline.__version__}\n"


def test_help_is_fast_because_it_loads_no_torch():
    code = (
        "import sys; sys.argv[1:] = ['--help']; import paceline.cli.app, atexit\n"
        "try: paceline.cli.app.main()\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tokenizers', 'jinja2', 'gguf', 'pydantic'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("bake",), "No such command 'bake'"),
        (("check",), "Missing argument 'MODEL'"),
        (("check", "x.yaml", "--loud"), "No such option: --loud"),
        (("build", "x.yaml", "--retune=2"), "does not take a value"),
        (("generate", "e", "--max-tokens", "many"), "unable to parse string as an integer"),
        (("generate", "e", "--max-tokens", "0"), "greater than or equal to 1"),
    ],
)
def test_usage_errors(run, arguments, says):
    ran = run(*arguments)
    assert ran.code == 2 and says in " ".join(ran.err.replace("│", " ").split()) and ran.out == ""


def test_presets(run):
    ran = run("presets", "--json")
    assert ran.code == 0 and "smollm2-135m" in ran.json
    assert all(name in run("presets").out for name in ran.json)
    assert ran.json["smollm2-135m"].endswith("so tokens are drafted from the text itself.")
    assert ran.json["qwen2.5-coder-14b-0.5b"] == "Qwen2.5-Coder-14B-Instruct (SpecDec)"


def test_check(run, config):
    ran = run("check", config)
    assert ran.code == 0 and ran.err == ""
    lines = ran.out.splitlines()
    assert lines[0].split() == ["option", "value", "from"]
    [line] = [line for line in lines if line.startswith("build.max_batch_size")]
    assert line.split()[1] == "4" and f"{config}:" in line
    options = {row["path"]: row for row in run("check", config, "--json").json["options"]}
    assert options["build.max_batch_size"]["value"] == 4
    assert options["quantization"]["origin"] == "default"


def test_check_shows_what_set_and_the_environment_change(run, config, monkeypatch):
    ran = run("check", config, "--set", "build.max_batch_size=7", "--json")
    [row] = [row for row in ran.json["options"] if row["path"] == "build.max_batch_size"]
    assert row["value"] == 7 and "--set" in row["origin"]


def test_check_of_the_reference_sample_without_its_checkpoints(run, monkeypatch, tmp_path):
    """They are not here and are not fetched: that is a warning, and the rest is shown."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: pytest.fail("the hub was asked"))
    ran = run("check", "preset:qwen2.5-coder-14b-0.5b")
    assert ran.code == 0 and "speculation.num_draft_tokens" in ran.out
    assert "warning: `Qwen/Qwen2.5-Coder-14B-Instruct` is not in the cache" in ran.err
    as_json = run("check", "preset:qwen2.5-coder-14b-0.5b", "--json")
    assert as_json.code == 0 and as_json.json["error"] is None and len(as_json.json["warnings"]) == 1


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (None, 2, "bad.yaml"),
        ("model: [", 2, "bad.yaml"),
        ("- a\n- b", 2, ""),
        ("", 2, "model"),
        ("model: ./nowhere", 3, "`./nowhere`"),
        ("model: ./x\nspeculatoin: off", 2, "speculation"),
        ("model: ./x\nbuild: {max_batch_size: many}", 2, "`build.max_batch_size`"),
        ("model: package:no-such-package", 3, "no-such-package"),
    ],
)
@pytest.mark.parametrize("command", [("check",), ("build", "-o", "out")])
def test_bad_configs(run, tmp_path, monkeypatch, text, code, says, command):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("bad.yaml").write_text(text)
    for flags in ((), ("--json",)):
        ran = run(command[0], "bad.yaml", *command[1:], *flags)
        assert ran.code == code, ran.err
        assert "error: " in ran.err and says in ran.err and "Traceback" not in ran.err
        if flags:
            assert says in ran.json["error"]["message"] + str(ran.json["error"]["hint"])
    assert not Path("out").exists()


def test_config_that_is_binary_or_a_folder(run, tmp_path):
    (tmp_path / "x").write_bytes(b"\x00\xff\xfe" * 50)
    assert run("check", tmp_path / "x").code == 2
    ran = run("check", tmp_path)
    assert ran.code == 3 and "config.json" in ran.err
    (tmp_path / "config.yaml").write_text("model: ./nowhere")
    assert "`./nowhere`" in run("check", tmp_path).err


def test_flags_are_options_of_the_config(run, config):
    flags = ("--speculation", "off", "--max-model-len", 99, "--served-model-name", "x y", "--set", "device=cpu")
    rows = {row["path"]: row for row in run("check", config, "--json", *flags).json["options"]}
    method = rows["speculation.method"]
    assert (method["value"], method["origin"]) == ("off", "command line --speculation")
    assert (rows["max_seq_len"]["value"], rows["served_model_name"]["value"]) == (99, "x y")
    assert rows["device"]["origin"] == "command line --set device"
    ran = run("check", config, "--quantization", "int3")
    assert ran.code == 2 and "`quantization` must be one of" in ran.err and "(--quantization)" in ran.err


def test_a_model_is_enough(run, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, _ = tiny("llama")
    ran = run("build", model, "--json", "--set", "build.autotune=false")
    assert ran.code == 0, ran.err
    folder = Path(ran.json["engine"])
    assert folder.parent == Path("engines") and folder.name.startswith(f"{model.name}-") and folder.is_dir()
    assert ran.json["manifest"]["method"] == "suffix"
    other = run("build", model, "--json", "--set", "build.autotune=false", "--speculation", "off").json["engine"]
    assert other != str(folder), "an engine of other options is another engine"
    for missing, code, says in (("x.gguf", 3, "x.gguf"), ("package:none-such", 3, "none-such"), ("a/b/c", 2, "preset")):
        ran = run("build", missing)
        assert ran.code == code and says in ran.err, ran.err


def test_build_talks_on_stderr_one_line_per_stage(run, config, tmp_path):
    ran = run("build", config, "-o", tmp_path / "e")
    assert ran.code == 0
    assert ran.err.splitlines() == ["quantise target ...", "tune kernels ...", "profile ..."]
    assert all(ord(c) >= 32 or c == "\n" for c in ran.err + ran.out), "no control characters where no terminal is"
    assert len(ran.out.splitlines()) == 5 and str(tmp_path / "e") in ran.out
    again = run("build", config, "-o", tmp_path / "e", "--json")
    assert again.err == "" and again.json["manifest"]["format_version"] == 1


def test_build_into_a_foreign_folder(run, config, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    ran = run("build", config, "-o", tmp_path, "--json")
    assert ran.code == 4 and ran.json["error"]["type"] == "BuildError" and "another output folder" in ran.err


def test_generate(run, engine):
    ran = run("generate", engine, "-p", "def add(", "--max-tokens", 12)
    assert ran.code == 0 and ran.out.endswith("\n") and "12 tokens in" in ran.err
    as_json = run("generate", engine, "-p", "def add(", "--max-tokens", 12, "--json").json
    assert as_json["text"] + "\n" == ran.out and len(as_json["token_ids"]) == 12
    streamed = run("generate", engine, "-p", "def add(", "--max-tokens", 12, "--stream")
    assert streamed.out == ran.out
    off = run("generate", engine, "-p", "def add(", "--max-tokens", 12, "--speculation", "off")
    assert off.out == ran.out and "acceptance" not in off.err


def test_prompt_from_file_and_standard_input(run, engine, tmp_path):
    (tmp_path / "prompt").write_text("def add(")
    expected = run("generate", engine, "-p", "def add(", "--max-tokens", 9).out
    assert run("generate", engine, "-f", tmp_path / "prompt", "--max-tokens", 9).out == expected
    assert run("generate", engine, "-f", "-", "--max-tokens", 9, stdin=b"def add(").out == expected


def test_chat_goes_through_the_template(run, engine):
    ran = run("generate", engine, "-c", "hello", "--max-tokens", 3, "--json").json
    plain = run("generate", engine, "-p", "hello", "--max-tokens", 3, "--json").json
    assert ran["num_prompt_tokens"] > plain["num_prompt_tokens"] + 3


@pytest.mark.parametrize("flags", [(), ("--stream",)])
def test_compare(run, engine, flags):
    ran = run("generate", engine, "-p", "add add add add", "--max-tokens", 30, "--compare", *flags)
    assert ran.code == 0 and "outputs are identical" in ran.err and "tokens from: target  draft  suffix" in ran.err
    text = run("generate", engine, "-p", "add add add add", "--max-tokens", 30).out.rstrip("\n")
    assert ran.out.count(text) == (2 if flags else 1)
    assert "\x1b[" not in ran.out + ran.err
    as_json = run("generate", engine, "-p", "add add", "--max-tokens", 9, "--compare", "--json").json
    assert as_json["identical"] and as_json["plain"]["token_ids"] == as_json["speculated"]["token_ids"]


def test_compare_colours_origins_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(console.data, "_force_terminal", True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(console.data, "no_color", False)
    for text, origin in (("a\tb", "target"), (":smile:", "suffix"), ("[d]", "draft")):
        generate._stream_coloured(text, origin)
    assert capsys.readouterr().out == "a\tb\x1b[36m:smile:\x1b[0m\x1b[32m[d]\x1b[0m"


def test_compare_that_differs_fails(run, engine, monkeypatch):
    import dataclasses

    from paceline.generate import Session

    real = Session.compare
    lie = lambda *a, **k: dataclasses.replace(real(*a, **k), identical=False)  # noqa: E731
    monkeypatch.setattr(Session, "compare", lie)
    ran = run("generate", engine, "-p", "add", "--max-tokens", 5, "--compare")
    assert ran.code == 1 and "outputs are DIFFERENT" in ran.err
    unseeded = run("generate", engine, "-p", "add", "--max-tokens", 5, "--compare", "--temperature", 1)
    assert unseeded.code == 0 and "DIFFERENT" not in unseeded.err and "give a --seed" in unseeded.err


def test_compare_prefills_the_whole_prompt_both_times(engine):
    """The TTFT it shows is that of a prompt never seen: no run may find another's prompt in the cache."""
    from paceline.generate import Ask, Session

    session = Session(engine, Ask(prompt="add add " * 20, sampling={"max_tokens": 4, "temperature": 0.0}))
    comparison = session.compare(None, None, lambda name: None)
    assert comparison.plain.num_prompt_tokens == comparison.speculated.num_prompt_tokens > 32
    assert session._opened.engine.metrics.prefix_cache_hits == 0


def test_max_tokens_that_do_not_fit_are_cut_aloud(run, engine):
    ran = run("generate", engine, "-p", "add", "--max-tokens", 99999)
    assert ran.code == 0 and "note: `max_tokens` 99999 is cut to the " in ran.err
    assert "note" not in run("generate", engine, "-p", "add", "--max-tokens", 9).err


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ((), 2, "exactly one of"),
        (("-p", "a", "-c", "b"), 2, "exactly one of"),
        (("-p", ""), 2, "has no tokens"),
        (("-p", "word " * 300), 2, "`max_seq_len` 256"),
        (("-p", "a", "--speculation", "magic"), 2, "off, draft, suffix or hybrid"),
        (("-p", "a", "--speculation", "draft"), 2, "`speculation.method`"),
        (("-p", "a", "--num-draft-tokens", "100000"), 2, "num_draft_tokens"),
        (("-p", "a", "--temperature", "nan"), 2, "`temperature`"),
        (("-p", "a", "--temperature", "-1"), 2, "`temperature`"),
        (("-p", "a", "--top-p", "0"), 2, "`top_p`"),
        (("-p", "a", "--top-k", "-5"), 2, "`top_k`"),
        (("-p", "a", "--stop", ""), 2, "`stop`"),
        (("-f", "/no/such/file"), 2, "No such file"),
        (("-f", "/"), 2, "Is a directory"),
        (("-p", "\udcff"), 2, "not UTF-8"),
    ],
)
def test_bad_requests(run, engine, options, code, says):
    ran = run("generate", engine, *options, "--json")
    assert ran.code == code and says in ran.err and ran.json["error"]["message"]


def test_files_that_are_no_text(run, engine, tmp_path, monkeypatch):
    (tmp_path / "binary").write_bytes(b"abc\xff\xfe\x00")
    ran = run("generate", engine, "-f", tmp_path / "binary")
    assert ran.code == 2 and "not UTF-8 text (byte 3)" in ran.err and "convert" in ran.err
    monkeypatch.setattr("paceline.generate.MAX_PROMPT_BYTES", 1 << 20)
    for endless in ("/dev/zero", tmp_path / "large"):
        (tmp_path / "large").write_bytes(b"x" * ((1 << 20) + 1))
        assert "larger than 1 MiB" in run("generate", engine, "-f", endless).err
    assert "larger than 1 MiB" in run("generate", engine, "-f", "-", stdin=b"x" * (2 << 20)).err


def test_engines_that_are_none(run, tmp_path):
    for folder, says in ((tmp_path / "nothing", "there is no engine"), (tmp_path, "not a finished engine")):
        ran = run("generate", folder, "-p", "a", "--json")
        assert ran.code == 5 and says in ran.err and ran.json["error"]["type"] == "EngineFolderError"


_OPTIONS = {
    "--temperature": st.floats() | st.text(max_size=5), "--top-p": st.floats() | st.text(max_size=5),
    "--top-k": st.integers(), "--seed": st.integers(), "--num-draft-tokens": st.integers(-3, 70),
    "--max-tokens": st.integers(-3, 40) | st.just(10**30), "--stop": st.text(max_size=4),
    "--prompt": st.text(max_size=30), "--chat": st.text(max_size=30),
    "--speculation": st.sampled_from(["off", "draft", "suffix", "hybrid", "", "x"]),
    "--stream": st.none(), "--compare": st.none(), "--json": st.none(), "--file": st.just("/dev/null"),
}  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(sorted(_OPTIONS)).flatmap(lambda n: st.tuples(st.just(n), _OPTIONS[n])), max_size=5))
def test_nothing_typed_gives_a_traceback(run, engine, options):
    arguments = [part for name, value in options for part in ((name,) if value is None else (f"{name}={value}",))]
    ran = run("generate", engine, *arguments)
    assert ran.code in (0, 2, 7), ran.err
    if ran.code and "--json" in arguments and "Usage:" not in ran.err:
        assert ran.json["error"]["message"]


def start(*arguments: object, **options) -> subprocess.Popen:
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*PROGRAM, *map(str, arguments)], env=environment, **(pipes | options))


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_signals_during_a_build_leave_nothing_in_the_way(run, tiny, tmp_path, number, word):
    """A model large enough that the signal finds it at work."""
    config = tmp_path / "c.yaml"
    model = tiny("llama", hidden_size=512, intermediate_size=1536, num_hidden_layers=6)[0]
    config.write_text(f"model: {model}\nbuild: {{max_num_tokens: 512}}\n")
    process = start("build", config, "-o", tmp_path / "e")
    assert process.stderr.readline() == "quantise target ...\n"
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == 128 + number
    assert err.splitlines()[-1] == word and "Traceback" not in err and out == ""
    assert not (tmp_path / "e").exists()
    assert run("build", config, "-o", tmp_path / "e").code == 0
    assert {file.name for file in tmp_path.iterdir()} == {"c.yaml", "e"}


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_signals_during_generation(engine, tmp_path, number, word):
    os.mkfifo(tmp_path / "prompt")
    process = start("generate", engine, "-f", tmp_path / "prompt")
    with (tmp_path / "prompt").open("w"):  # opens once the command reads: it is at work
        time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == 128 + number
    assert err == f"{word}\n" and out == ""


@pytest.mark.parametrize("arguments", [("check", "preset:smollm2-135m"), ("presets",)])
def test_reader_that_leaves_early(arguments):
    read, write = os.pipe()
    os.close(read)
    process = start(*arguments, stdout=write)
    os.close(write)
    _, err = process.communicate()
    assert process.returncode == 1 and "Traceback" not in err and "BrokenPipe" not in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("flags", [(), ("--stream",), ("--json",), ("--compare",)])
def test_output_onto_a_full_disk(engine, config, flags):
    for arguments in (("generate", engine, "-p", "add", "--max-tokens", 9, *flags), ("check", config)):
        with open("/dev/full", "w") as full:
            process = start(*arguments, stdout=full)
            _, err = process.communicate()
        assert process.returncode == 1 and "Traceback" not in err
        assert err.splitlines()[-1] == "error: cannot write the output: No space left on device"


def test_output_that_the_terminal_cannot_show(engine):
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [*PROGRAM, "generate", str(engine), "-p", "naïve 漢字", "--max-tokens", "20"]
    done = subprocess.run(command, capture_output=True, env=environment)
    assert done.returncode == 0 and b"Traceback" not in done.stderr
