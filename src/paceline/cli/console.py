"""What is printed where: data on stdout, talk on stderr, tables, JSON, progress bars. Knows no command."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from paceline.errors import PacelineError

talk = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
data = Console(highlight=False, emoji=False, soft_wrap=True)


def say(text: str) -> None:
    """A line of talk; warnings are coloured."""
    talk.print(text, style="yellow" if text.startswith("warning") else None, markup=False)


def say_error(error: PacelineError) -> None:
    talk.print("[bold red]error:[/] ", end="")
    talk.print(str(error), markup=False)


def show(table: Table) -> None:
    """Print a table: folded to a terminal's width, one line per row for anything else that reads it."""
    console = data if data.is_terminal else Console(highlight=False, emoji=False, width=10_000)
    console.print(table)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def described(error: PacelineError) -> dict[str, str | None]:
    """An error as JSON has it."""
    return {"type": type(error).__name__, "message": error.message, "hint": error.hint}


class StageProgress:
    """Shows the stages of long work on stderr: as bars on a terminal, as one line each elsewhere."""

    def __init__(self) -> None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}")
        self._bars = Progress(*columns, TimeElapsedColumn(), console=talk)
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> StageProgress:
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
