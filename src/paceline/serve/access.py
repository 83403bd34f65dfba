"""Who may ask, how much, and what is written down of it: an ASGI layer around the app, before any body is read.

Knows headers, sizes and the log; knows nothing of what is asked.
"""

from __future__ import annotations

import hmac
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException

_OPEN_PATHS = ("/health", "/ready", "/")  # what a load balancer and a browser ask before they have a key


@dataclass(frozen=True)
class ServeOptions:
    """How to serve. `api_keys` empty: everybody may ask."""

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 32 << 20
    request_timeout_seconds: float | None = 600.0
    access_log: bool = False
    page: bool = True


class Access:
    """ASGI middleware: API keys, the limit on bodies, the access log (a JSON object a line on stdout, no prompts)."""

    def __init__(self, app: Any, options: ServeOptions, respond: Callable[..., Any]):
        self._app, self._options, self._respond = app, options, respond
        self._keys = [key.encode() for key in options.api_keys]

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, status = time.perf_counter(), 499

        async def watched(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._guarded(scope, receive, watched)
        finally:
            if self._options.access_log:
                self._log(scope, status, time.perf_counter() - started)

    async def _guarded(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        if not self._may(scope, headers):
            message = "the API key is missing or wrong"
            hint = "send `Authorization: Bearer KEY` with a key of this server."
            response = self._respond(401, message, hint, headers={"www-authenticate": "Bearer"})
            return await response(scope, receive, send)
        limit, received = self._options.max_body_bytes, 0
        message = f"the body is larger than {limit} bytes: send less, or raise the server's `--max-body-mb`"
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:18]) > limit:
            return await self._respond(413, message)(scope, receive, send)

        async def counted() -> dict[str, Any]:
            nonlocal received
            part = await receive()
            received += len(part.get("body", b""))
            if received > limit:
                raise HTTPException(413, message)  # FastAPI, which is reading, lets this one through
            return part

        await self._app(scope, counted, send)

    def _may(self, scope: dict[str, Any], headers: dict[bytes, bytes]) -> bool:
        path = scope["path"]
        if not self._keys or path in _OPEN_PATHS or path.startswith("/page/") or scope["method"] == "OPTIONS":
            return True
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        # Every key is compared in full, so that the time taken tells nothing.
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(matches)

    def _log(self, scope: dict[str, Any], status: int, seconds: float) -> None:
        client = scope.get("client")
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
        }
        print(json.dumps(entry), file=sys.stdout, flush=True)
