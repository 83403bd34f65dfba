"""From an engine folder to a running server: opens, listens, drains, says why it ended. Knows processes and sockets."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from paceline.assemble import OpenEngine, open_engine
from paceline.build.resolve import Listener
from paceline.config import Config
from paceline.errors import ConfigError, EngineDeadError
from paceline.serve.access import ServeOptions
from paceline.serve.app import create_app
from paceline.serve.requests import ServedModel
from paceline.serve.tracing import tracer_provider
from paceline.serve.worker import EngineWorker

KEY_VARIABLE = "PACELINE_API_KEY"


@dataclass(frozen=True)
class Address:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one


def served_model(opened: OpenEngine) -> ServedModel:
    manifest = opened.manifest
    return ServedModel(
        name=opened.config.served_model_name or manifest.served_model_name,
        tokenizer=opened.tokenizer,
        chat_template=opened.chat_template,
        max_seq_len=manifest.max_seq_len,
        special_tokens=manifest.special_tokens,
        method=manifest.method,
        num_draft_tokens=manifest.num_draft_tokens,
        fingerprint=f"paceline-{manifest.key[:12]}",
    )


def _facts(opened: OpenEngine) -> str:
    """What whoever starts a server should know of it at once."""
    size = opened.kv_cache_bytes / 1e9
    return (
        f"method: {opened.manifest.method or 'off'}; KV cache: {opened.num_cache_tokens:,} tokens, {size:.1f} GB when "
        "full"
    )


def read_api_keys(file: Path | None) -> tuple[str, ...]:
    """Keys from a file, one per line, and from the environment. Raises ConfigError if the file cannot be read or has
    none: a server that was meant to be closed must not be open."""
    keys = [os.environ[KEY_VARIABLE]] if os.environ.get(KEY_VARIABLE) else []
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"`--api-key-file` {file} cannot be read: {error}") from error
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise ConfigError(f"`--api-key-file` {file} has no key", hint="write one key per line.")
        keys += found
    return tuple(keys)


class _Server(uvicorn.Server):
    """uvicorn, telling when connections are accepted: a bound socket alone still refuses them."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]):
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()


def listen(address: Address) -> socket.socket:
    """A bound socket. Raises ConfigError saying what to do if the address cannot be had."""
    try:
        [family, *_] = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        listener = socket.socket(family[0], family[1])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(family[4])
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen on `{address.host}` port {address.port}: {reason}",
            hint="choose another `--port` (0 takes any free one) or `--host`.",
        ) from error
    return listener


def serve(
    folder: Path,
    address: Address,
    options: ServeOptions,
    *,
    config: Config | None = None,
    max_queue: int,
    drain_seconds: int,
    say: Callable[[str], None],
) -> None:
    """Serve an engine folder until a signal ends it: then no new connection is taken, and running requests have
    `drain_seconds` to finish; a second signal ends at once. `config` overrides the runtime options it was built with.

    Raises EngineDeadError if the engine fails while serving, ConfigError for an address or keys that cannot be used.
    """
    listener = listen(address)  # before the engine is loaded: a wrong port should not take a minute to be said
    opened = open_engine(folder, config=config, listener=Listener(say=say))
    model = served_model(opened)
    host, port = listener.getsockname()[:2]
    provider = tracer_provider()
    worker = EngineWorker(opened.engine, opened.config.build.max_batch_size, max_queue)
    try:
        app = create_app(model, worker, options, None if provider is None else provider.get_tracer("paceline"))
        shown = f"[{host}]" if ":" in host else host
        server = _Server(
            uvicorn.Config(
                app, log_config=None, lifespan="off", timeout_graceful_shutdown=drain_seconds, server_header=False
            ),
            lambda: say(f"serving {model.name} on http://{shown}:{port}/v1 ({_facts(opened)})"),
        )
        worker.on_failure = lambda: setattr(server, "should_exit", True)
        server.run(sockets=[listener])
    finally:
        worker.close()
        listener.close()
        if provider is not None:
            provider.shutdown()
    if worker.failure is not None:
        reason = f"{type(worker.failure).__name__}: {worker.failure}"
        raise EngineDeadError(f"the engine failed while serving: {reason}", hint="restart the server.")
