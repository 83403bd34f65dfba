"""`paceline check`, `paceline build` and `paceline presets`: from a model or config to an engine folder."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from paceline.cli.console import StageProgress, described, print_json, say, say_error, show, talk
from paceline.cli.options import JsonOption, ModelArgument, OutputOption, Overrides, engine_folder, with_overrides
from paceline.errors import HubUnreachableError, PacelineError


@with_overrides
def check(model: ModelArgument, overrides: Overrides, as_json: JsonOption = False) -> None:
    """Print the resolved config, where each value came from, and warnings. Downloads nothing."""
    from paceline.build.resolve import Listener, resolve
    from paceline.config import load_config
    from paceline.config.explain import explain

    loaded = load_config(model, overrides)
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
        print_json({
            "options": [{"path": r.path, "value": r.value, "origin": str(r.origin)} for r in rows],
            "notes": [str(note) for note in loaded.notes],
            "warnings": list(warnings),
            "error": None if problem is None else described(problem),
        })  # fmt: skip
    else:
        table = Table(box=None, pad_edge=False)
        for heading in ("option", "value", "from"):
            table.add_column(heading, overflow="fold")
        for row in rows:
            value = "–" if row.value is None else str(row.value)
            cells = map(escape, (row.path, value, str(row.origin)))
            table.add_row(*cells, style="dim" if str(row.origin) == "default" else None)
        show(table)
        for note in loaded.notes:
            say(f"{'warning' if note.is_warning else 'note'}: {note}")
        for warning in warnings:
            say(f"warning: {warning}")
    if problem:
        say_error(problem)
        raise typer.Exit(problem.exit_code)


@with_overrides
def build(
    model: ModelArgument,
    overrides: Overrides,
    output: OutputOption = None,
    retune: Annotated[bool, typer.Option("--retune", help="Measure kernels and costs again on this machine.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Build an engine folder from a model or a config.

    Interrupted builds resume; a second build of the same config is instant.
    """
    output = output or engine_folder(model, overrides)
    manifest = build_folder(model, output, overrides, retune)
    if as_json:
        print_json({"engine": str(output), "manifest": manifest.model_dump(mode="json")})
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    size = manifest.target.weight_bytes + (manifest.draft.weight_bytes if manifest.draft else 0)
    table.add_row("engine", f"{escape(str(output))} ({size / 1e6:.0f} MB)")
    for choice in manifest.choices:
        table.add_row(choice.what, f"{escape(choice.chosen)} [dim]({escape(choice.because)})[/]")
    costs = ", ".join(f"{n}: {s * 1e3:.1f}" for n, s in manifest.costs.target.items() if n in (1, 4, 8, 16, 32, 64))
    table.add_row("step by rows, ms", costs)
    show(table)
    if talk.is_terminal:
        command = shlex.join(["paceline", "generate", str(output), "--prompt", "def fib(n):", "--compare"])
        talk.print(f"try it: {command}", style="dim", markup=False)


def build_folder(source: str, output: Path, overrides: Overrides, retune: bool = False) -> Any:
    """Build what `source` names into `output`, showing progress; the engine's manifest."""
    from paceline.build.builder import build_engine
    from paceline.build.resolve import Listener
    from paceline.config import load_config

    loaded = load_config(source, overrides)
    for note in loaded.notes:
        say(f"{'warning' if note.is_warning else 'note'}: {note}")
    with StageProgress() as progress:
        return build_engine(loaded.config, output, Listener(progress.stage, say), retune)


def presets(as_json: JsonOption = False) -> None:
    """List the bundled configs. Use one as `preset:NAME` wherever a model or config is asked for."""
    from paceline.config import preset_names, preset_summary

    summaries = {name: preset_summary(name) for name in preset_names()}
    if as_json:
        print_json(summaries)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, summary in summaries.items():
        table.add_row(f"[bold]{name}[/]", escape(summary))
    show(table)
