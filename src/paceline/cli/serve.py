"""`paceline serve`: from an engine, a model or a config to an endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.build import build_folder
from paceline.cli.console import say
from paceline.cli.options import DEFAULT_MODEL, OutputOption, Overrides, engine_folder, with_overrides


@with_overrides
def serve(
    overrides: Overrides,
    model: Annotated[
        str,
        typer.Argument(
            metavar="[MODEL]",
            help="An engine folder; or a model (hub id, directory, `.gguf` file, `package:NAME`), a config file or a "
            "preset, which is built first. Nothing: the small embedded default.",
            show_default=False,
        ),
    ] = DEFAULT_MODEL,
    output: OutputOption = None,
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
    """Serve a model as an OpenAI-compatible endpoint: /v1/chat/completions, /v1/completions, /metrics and more.

    `paceline serve Qwen/Qwen2.5-Coder-0.5B-Instruct --speculation suffix` is all there is to it.
    """
    from paceline.serve.access import ServeOptions
    from paceline.serving import Address, read_api_keys
    from paceline.serving import serve as run

    options = ServeOptions(
        api_keys=read_api_keys(api_key_file), cors_origins=tuple(cors_origin), max_body_bytes=max_body_mb << 20,
        request_timeout_seconds=request_timeout, access_log=access_log, page=page,
    )  # fmt: skip
    folder, config = Path(model), None
    if _is_engine(folder):
        from paceline.assemble import runtime_config

        config = runtime_config(folder, overrides)
        if output is not None:
            say("note: `--output` is for models and configs: this is an engine already.")
    else:
        folder = output or engine_folder(model, overrides)
        build_folder(model, folder, overrides)
    run(folder, Address(host, port), options, config=config, max_queue=max_queue, drain_seconds=drain, say=say)


def _is_engine(folder: Path) -> bool:
    from paceline.build.manifest import MANIFEST

    return (folder / MANIFEST).is_file()
