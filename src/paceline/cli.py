"""The command line: parse, make one call, print. stdout is data, stderr is talk.

Knows options, colours and exit codes; every decision is made elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

import paceline
from paceline.errors import PacelineError

app = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="The open engine builder for speculative decoding.\n\nOne config file in: `paceline check` explains it, "
    "`paceline build` makes an engine of it, `paceline generate` completes prompts with it.",
    epilog="Start with `paceline build preset:smollm2-135m -o engines/demo`, then `paceline generate engines/demo "
    "--prompt 'def fib(n):' --compare`.",
)
talk = Console(stderr=True, highlight=False, soft_wrap=True)
data = Console(highlight=False, soft_wrap=True)

ConfigArgument = Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or `preset:NAME`.")]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override an option, e.g. `build.max_batch_size=8`.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, for programs.")]


def main() -> None:
    """Entry point: every expected failure becomes a message and an exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        app(standalone_mode=True)
    except PacelineError as error:
        _fail(error)
    except KeyboardInterrupt:
        talk.print("[yellow]interrupted[/]")
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)


def _terminate(signum: int, frame: object) -> None:
    talk.print("[yellow]terminated[/]")
    sys.exit(128 + signum)


def _fail(error: PacelineError) -> None:
    if "--json" in sys.argv:
        kind = type(error).__name__
        print(json.dumps({"error": {"type": kind, "message": error.message, "hint": error.hint}}))
    talk.print("[bold red]error:[/] ", end="")
    talk.print(str(error), markup=False)
    sys.exit(error.exit_code)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _version(wanted: bool) -> None:
    if wanted:
        print(paceline.__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


class BuildProgress:
    """Shows a build's stages as progress bars on stderr; says notices between them."""

    def __init__(self) -> None:
        self._bars = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            console=talk, transient=not talk.is_terminal,
        )  # fmt: skip
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> BuildProgress:
        self._bars.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()

    def stage(self, name: str, done: int, total: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total)
            if not talk.is_terminal:
                talk.print(f"{name} ...", markup=False)
        self._bars.update(self._tasks[name], completed=done, total=total)

    def say(self, text: str) -> None:
        talk.print(text, style="yellow" if text.startswith("warning") else None, markup=False)


@app.command()
def check(config: ConfigArgument, set_: SetOption = [], as_json: JsonOption = False) -> None:  # noqa: B006
    """Print the resolved config, where each value came from, and warnings. Downloads no weights that are not here."""
    from paceline.build.builder import Listener, resolve
    from paceline.config import load_config
    from paceline.config.explain import explain

    loaded = load_config(config, set_)
    rows = explain(loaded)
    problem: PacelineError | None = None
    warnings: tuple[str, ...] = ()
    try:
        warnings = resolve(loaded.config, Listener()).warnings
    except PacelineError as error:
        problem = error
    if as_json:
        _print_json({
            "options": [{"path": r.path, "value": r.value, "origin": str(r.origin)} for r in rows],
            "notes": [str(note) for note in loaded.notes],
            "warnings": list(warnings),
            "error": None if problem is None else {"message": problem.message, "hint": problem.hint},
        })  # fmt: skip
    else:
        table = Table(box=None, pad_edge=False)
        for heading in ("option", "value", "from"):
            table.add_column(heading, overflow="fold")
        for row in rows:
            value = "–" if row.value is None else str(row.value)
            table.add_row(row.path, value, str(row.origin), style="dim" if str(row.origin) == "default" else None)
        data.print(table)
        for note in loaded.notes:
            talk.print(f"{'warning' if note.is_warning else 'note'}: {note}", markup=False)
        for warning in warnings:
            talk.print(f"warning: {warning}", style="yellow", markup=False)
    if problem:
        raise problem


@app.command()
def build(
    config: ConfigArgument,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="ENGINE", help="Engine folder to write.")],
    set_: SetOption = [],  # noqa: B006
    retune: Annotated[bool, typer.Option("--retune", help="Measure kernels and costs again on this machine.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build an engine folder from a config. Interrupted builds resume; a second build of the same config is instant."""
    from paceline.build.builder import Listener, build_engine
    from paceline.config import load_config

    loaded = load_config(config, set_)
    for note in loaded.notes:
        talk.print(f"{'warning' if note.is_warning else 'note'}: {note}", markup=False)
    with BuildProgress() as progress:
        manifest = build_engine(loaded.config, output, Listener(progress.stage, progress.say), retune)
    if as_json:
        _print_json({"engine": str(output), "manifest": manifest.model_dump(mode="json")})
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    size = manifest.target.weight_bytes + (manifest.draft.weight_bytes if manifest.draft else 0)
    table.add_row("engine", f"{output} ({size / 1e6:.0f} MB)")
    for choice in manifest.choices:
        table.add_row(choice.what, f"{choice.chosen} [dim]({choice.because})[/]")
    costs = ", ".join(f"{n}: {s * 1e3:.1f}" for n, s in manifest.costs.target.items() if n in (1, 4, 8, 16, 32, 64))
    table.add_row("step by rows, ms", costs)
    data.print(table)


@app.command()
def presets(as_json: JsonOption = False) -> None:
    """List the bundled configs. Use one as `preset:NAME` wherever a config is asked for."""
    from paceline.config import preset_names, preset_text

    described = {name: preset_text(name).splitlines()[0].lstrip("# ") for name in preset_names()}
    if as_json:
        _print_json(described)
        return
    for name, first_line in described.items():
        data.print(f"[bold]{name}[/]  {first_line}")


@app.command()
def generate(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="An engine folder made by `paceline build`.")],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue.")] = None,
    chat: Annotated[str | None, typer.Option("--chat", "-c", help="A user's message, through the chat template.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Prompt from a file (`-`: stdin).")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Run plain and speculated; colour tokens by origin.")] = False,
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
    session = Session(engine, ask, say=lambda text: talk.print(text, style="yellow", markup=False))
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
    data.print(text, end="", style=_COLOURS.get(origin), markup=False)


def _compare(session: Any, stream: bool, as_json: bool) -> None:
    """Plain, then speculated; the plain run comes first so that it cannot profit from the other's cache."""
    comparison = session.compare(
        on_plain=_stream_text if stream and not as_json else None,
        on_speculated=_stream_coloured if stream and not as_json else None,
        between=lambda name: talk.print(f"\n── {name} ──", style="bold"),
    )
    if as_json:
        _print_json(dataclasses.asdict(comparison))
    else:
        if not stream:
            for text, origin in comparison.speculated.pieces:
                _stream_coloured(text, origin)
        data.print()
        legend = "  ".join(f"[{colour}]{name}[/]" if colour else name for name, colour in _COLOURS.items())
        talk.print(f"\ntokens from: {legend}")
        for name, result in (("plain", comparison.plain), ("speculated", comparison.speculated)):
            talk.print(f"{name:>10}: {result.line()}", markup=False)
        speedup = f"{comparison.speedup:.2f}× the decoding speed"
        same = "identical" if comparison.identical else "DIFFERENT"
        talk.print(f"[bold]{speedup}; outputs are {same}[/]")
    if not comparison.identical and comparison.must_be_identical:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
