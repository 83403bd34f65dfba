"""The application: its commands, and what becomes of errors and signals, whichever command runs."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer
from rich.markup import escape

import paceline
from paceline.cli import build, generate, serve
from paceline.cli.console import data, described, print_json, say_error, talk
from paceline.errors import PacelineError

app = typer.Typer(
    name="paceline",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="The open engine builder for speculative decoding.\n\nA model, or one config file, in: `paceline serve` "
    "answers OpenAI clients, `paceline build` makes an engine, `paceline check` explains the config, `paceline "
    "generate` completes prompts.",
    epilog="Start with `paceline serve`, which serves the small embedded default, or with a model of your own: "
    "`paceline serve ./model.gguf`.",
)
for command in (build.check, build.build, serve.serve, build.presets, generate.generate):
    app.command()(command)


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
        print_json({"error": described(error)})
    say_error(error)
    sys.exit(error.exit_code)


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
