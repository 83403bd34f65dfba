"""The command line: parse, make one call, print. stdout is data, stderr is talk.

Knows options, colours and exit codes; every decision is made elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import paceline
from paceline.errors import HubUnreachableError, PacelineError

app = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="The open engine builder for speculative decoding.\n\nOne config file in: `paceline check` explains it, "
    "`paceline build` makes an engine of it, `paceline generate` completes prompts with it, `paceline serve` answers "
    "OpenAI clients.",
    epilog="Start with `paceline build preset:smollm2-135m -o engines/demo`, then `paceline generate engines/demo "
    "--prompt 'def fib(n):' --compare`.",
)
talk = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
data = Console(highlight=False, emoji=False, soft_wrap=True)

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or `preset:NAME`.")]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override an option, e.g. `build.max_batch_size=8`.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, for programs.")]


def main() -> None:
    """Entry point: every expected failure becomes a message and an exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows another: no reason to fail.
        stream.reconfigure(errors="replace")
    try:
        try:
            app(prog_name="paceline")
        except PacelineError as error:
            _fail(error)
        except _Stopped as stop:
            # Said here, where everything that was running has ended.
            if data.is_terminal:
                talk.print()  # streamed text may have left the cursor within a line
            talk.print("interrupted" if stop.number == signal.SIGINT else "terminated", style="yellow")
            sys.exit(128 + stop.number)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read our output has left, as `head` does; nothing more is to be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.filename is not None:
            raise
        # Our own output cannot be written: a full disk behind `> file`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        talk.print(f"[bold red]error:[/] cannot write the output: {escape(error.strerror or str(error))}")
        sys.exit(1)


class _Stopped(BaseException):
    """A signal asked the process to end. No `except Exception` on the way out keeps it."""

    def __init__(self, number: int):
        self.number = number


def _stop(number: int, frame: object) -> None:
    for again in (signal.SIGINT, signal.SIGTERM):
        signal.signal(again, signal.SIG_DFL)  # whoever asks a second time does not want to wait for the cleaning up
    raise _Stopped(number)


def _fail(error: PacelineError) -> None:
    if "--json" in sys.argv:
        _print_json({"error": _described(error)})
    _say_error(error)
    sys.exit(error.exit_code)


def _described(error: PacelineError) -> dict[str, str | None]:
    return {"type": type(error).__name__, "message": error.message, "hint": error.hint}


def _say_error(error: PacelineError) -> None:
    talk.print("[bold red]error:[/] ", end="")
    talk.print(str(error), markup=False)


def _say(text: str) -> None:
    talk.print(text, style="yellow" if text.startswith("warning") else None, markup=False)


def _show(table: Table) -> None:
    """Print a table: folded to a terminal's width, one line per row for anything else that reads it."""
    console = data if data.is_terminal else Console(highlight=False, emoji=False, width=10_000)
    console.print(table)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _version(wanted: bool) -> None:
    if wanted:
        print(paceline.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


class BuildProgress:
    """Shows a build's stages on stderr: as bars on a terminal, as one line each elsewhere."""

    def __init__(self) -> None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}")
        self._bars = Progress(*columns, TimeElapsedColumn(), console=talk)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> BuildProgress:
        if talk.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if talk.is_terminal:
            self._bars.stop()

    def stage(self, name: str, done: int, total: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, count="")
            if not talk.is_terminal:
                talk.print(f"{name} ...", markup=False)
        count = f"{done / 1e6:.0f}/{total / 1e6:.0f} MB" if name.startswith("download") else f"{done}/{total}"
        self._bars.update(self._tasks[name], completed=done, total=total, count=count)


@app.command()
def check(config: ConfigArgument, set_: SetOption = [], as_json: JsonOption = False) -> None:  # noqa: B006
    """Print the resolved config, where each value came from, and warnings. Downloads nothing."""
    from paceline.build.resolve import Listener, resolve
    from paceline.config import load_config
    from paceline.config.explain import explain

    loaded = load_config(config, set_)
    rows = explain(loaded)
    problem: PacelineError | None = None
    warnings: tuple[str, ...] = ()
    try:
        warnings = resolve(loaded.config, Listener(), offline=True).warnings
    except HubUnreachableError as error:
        warnings = (f"{error.message}: what depends on the checkpoints is not checked; `paceline build` fetches them.",)
    except PacelineError as error:
        problem = error
    if as_json:
        _print_json({
            "options": [{"path": r.path, "value": r.value, "origin": str(r.origin)} for r in rows],
            "notes": [str(note) for note in loaded.notes],
            "warnings": list(warnings),
            "error": None if problem is None else _described(problem),
        })  # fmt: skip
    else:
        table = Table(box=None, pad_edge=False)
        for heading in ("option", "value", "from"):
            table.add_column(heading, overflow="fold")
        for row in rows:
            value = "–" if row.value is None else str(row.value)
            cells = map(escape, (row.path, value, str(row.origin)))
            table.add_row(*cells, style="dim" if str(row.origin) == "default" else None)
        _show(table)
        for note in loaded.notes:
            _say(f"{'warning' if note.is_warning else 'note'}: {note}")
        for warning in warnings:
            _say(f"warning: {warning}")
    if problem:
        _say_error(problem)
        raise typer.Exit(problem.exit_code)


@app.command()
def build(
    config: ConfigArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="ENGINE", help="Engine folder to write.")],
    set_: SetOption = [],  # noqa: B006
    retune: Annotated[bool, typer.Option("--retune", help="Measure kernels and costs again on this machine.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build an engine folder from a config. Interrupted builds resume; a second build of the same config is instant."""
    manifest = _build(config, output, set_, retune)
    if as_json:
        _print_json({"engine": str(output), "manifest": manifest.model_dump(mode="json")})
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    size = manifest.target.weight_bytes + (manifest.draft.weight_bytes if manifest.draft else 0)
    table.add_row("engine", f"{escape(str(output))} ({size / 1e6:.0f} MB)")
    for choice in manifest.choices:
        table.add_row(choice.what, f"{escape(choice.chosen)} [dim]({escape(choice.because)})[/]")
    costs = ", ".join(f"{n}: {s * 1e3:.1f}" for n, s in manifest.costs.target.items() if n in (1, 4, 8, 16, 32, 64))
    table.add_row("step by rows, ms", costs)
    _show(table)
    if talk.is_terminal:
        command = shlex.join(["paceline", "generate", str(output), "--prompt", "def fib(n):", "--compare"])
        talk.print(f"try it: {command}", style="dim", markup=False)


def _build(config: str, output: Path, set_: list[str], retune: bool) -> Any:
    from paceline.build.builder import build_engine
    from paceline.build.resolve import Listener
    from paceline.config import load_config

    loaded = load_config(config, set_)
    for note in loaded.notes:
        _say(f"{'warning' if note.is_warning else 'note'}: {note}")
    with BuildProgress() as progress:
        return build_engine(loaded.config, output, Listener(progress.stage, _say), retune)


@app.command()
def serve(
    engine: Annotated[
        str, typer.Argument(metavar="ENGINE", help="An engine folder, or a config (built first).")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FOLDER", help="Where a config's engine goes; unset is engines/NAME."),
    ] = None,
    set_: SetOption = [],  # noqa: B006
    host: Annotated[str, typer.Option(help="Address to listen on; `0.0.0.0` lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File of API keys, one per line; `PACELINE_API_KEY` adds one. With none, all may ask."),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(min=0, help="Requests that may wait; more are answered 429 with Retry-After.")
    ] = 256,
    request_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds a request may take.")] = 600.0,
    drain: Annotated[int, typer.Option(min=0, help="Seconds that running requests have after SIGTERM or Ctrl-C.")] = 30,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest body, in megabytes.")] = 32,
    cors_origin: Annotated[
        list[str], typer.Option(help="A web origin that may ask from a browser; may be given again.")
    ] = [],  # noqa: B006
    access_log: Annotated[bool, typer.Option("--access-log", help="A JSON line per request on stdout.")] = False,
    page: Annotated[bool, typer.Option(help="Serve the chat page at /.")] = True,
) -> None:
    """Serve an engine as an OpenAI-compatible endpoint: /v1/chat/completions, /v1/completions, /metrics and more."""
    from paceline.serve.access import ServeOptions
    from paceline.serving import Address, read_api_keys
    from paceline.serving import serve as run

    folder = Path(engine)
    if not folder.is_dir():
        folder = output or Path("engines") / Path(engine.removeprefix("preset:")).stem
        _build(engine, folder, set_, retune=False)
    elif set_ or output:
        _say("note: `--set` and `--output` are for configs: this is an engine already, and they are not used.")
    options = ServeOptions(
        api_keys=read_api_keys(api_key_file), cors_origins=tuple(cors_origin), max_body_bytes=max_body_mb << 20,
        request_timeout_seconds=request_timeout, access_log=access_log, page=page,
    )  # fmt: skip
    run(folder, Address(host, port), options, max_queue=max_queue, drain_seconds=drain, say=_say)


@app.command()
def presets(as_json: JsonOption = False) -> None:
    """List the bundled configs. Use one as `preset:NAME` wherever a config is asked for."""
    from paceline.config import preset_names, preset_summary

    described = {name: preset_summary(name) for name in preset_names()}
    if as_json:
        _print_json(described)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, summary in described.items():
        table.add_row(f"[bold]{name}[/]", escape(summary))
    _show(table)


@app.command()
def generate(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="An engine folder made by `paceline build`.")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue.")] = None,
    chat: Annotated[
        str | None, typer.Option("--chat", "-c", help="A user's message, through the chat template.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Prompt from a file (`-`: stdin).")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run plain and speculated; colour tokens by origin.")
    ] = False,
    speculation: Annotated[
        str | None, typer.Option("--speculation", help="off, draft, suffix or hybrid; unset is the engine's own.")
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(min=1, help="Draft tokens per round.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    top_k: Annotated[int, typer.Option()] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable, with or without speculation.")] = None,
    stop: Annotated[list[str], typer.Option(help="Stop at this text; may be given again.")] = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Complete a prompt, a chat message or a file with an engine."""
    from paceline.generate import Ask, Session

    ask = Ask(
        prompt=prompt, chat=chat, file=file, speculation=speculation, num_draft_tokens=num_draft_tokens,
        sampling={
            "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed,
            "stop": tuple(stop),
        },
    )  # fmt: skip
    session = Session(engine, ask, say=_say)
    if compare:
        _compare(session, stream, as_json)
        return
    result = session.run(on_text=_stream_text if stream and not as_json else None)
    if as_json:
        _print_json(dataclasses.asdict(result))
        return
    print("" if stream else result.text)
    talk.print(result.line(), style="dim", markup=False)


_COLOURS = {"target": None, "draft": "green", "suffix": "cyan"}


def _stream_text(text: str, origin: str) -> None:
    print(text, end="", flush=True)


def _stream_coloured(text: str, origin: str) -> None:
    # Not through rich, which would expand tabs and drop control characters: this is the model's text.
    colour = _COLOURS.get(origin) if data.is_terminal and not data.no_color else None
    print(typer.style(text, fg=colour) if colour else text, end="", flush=True)


def _statistics(results: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("", "tokens", "tokens/s", "TTFT, ms", "rounds", "drafts accepted", "finished by"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        drafted, accepted = result.num_draft_tokens, result.num_accepted_tokens
        acceptance = f"{accepted / drafted:.0%} ({accepted} of {drafted})" if drafted else "–"
        numbers = f"{result.decode_tokens_per_second:.1f}", f"{result.ttft_seconds * 1e3:.0f}", str(result.num_rounds)
        table.add_row(name, str(result.num_tokens), *numbers, acceptance, result.finish_reason)
    return table


def _compare(session: Any, stream: bool, as_json: bool) -> None:
    """Plain, then speculated; the plain run comes first so that it cannot profit from the other's cache."""

    def between(name: str) -> None:
        if stream and not as_json:
            talk.print(f"{'' if name == 'plain' else chr(10)}── {name} ──", style="bold")

    comparison = session.compare(
        on_plain=_stream_text if stream and not as_json else None,
        on_speculated=_stream_coloured if stream and not as_json else None,
        between=between,
    )
    if as_json:
        _print_json(dataclasses.asdict(comparison))
    else:
        if not stream:
            for text, origin in comparison.speculated.pieces:
                _stream_coloured(text, origin)
        print(flush=True)
        legend = "  ".join(f"[{colour}]{name}[/]" if colour else name for name, colour in _COLOURS.items())
        talk.print(f"tokens from: {legend}")
        talk.print(_statistics({"plain": comparison.plain, "speculated": comparison.speculated}))
        speedup = f"{comparison.speedup:.2f}× the decoding speed"
        same = "identical" if comparison.identical else "DIFFERENT"
        if not comparison.must_be_identical:
            same = "two independent samples: give a --seed to get the same text twice"
        talk.print(f"[bold]{speedup}; outputs are {same}[/]")
    if not comparison.identical and comparison.must_be_identical:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
