"""`paceline generate`: one prompt through an engine, printed as it comes or compared with plain decoding."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from paceline.cli.console import data, print_json, say, talk
from paceline.cli.options import JsonOption


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
    session = Session(engine, ask, say=say)
    if compare:
        _compare(session, stream, as_json)
        return
    result = session.run(on_text=_stream_text if stream and not as_json else None)
    if as_json:
        print_json(dataclasses.asdict(result))
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
        print_json(dataclasses.asdict(comparison))
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
