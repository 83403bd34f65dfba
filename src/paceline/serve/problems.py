"""What is wrong with a request, as OpenAI's error object has it. Knows errors and bodies, nothing of routes."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from paceline.errors import RequestError
from paceline.serve.openai_types import UNSUPPORTED

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_JSON_TYPES = ("application/json", "+json")


class AsciiJSONResponse(JSONResponse):
    """JSON that any text survives, lone surrogates included."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode("ascii")


def error_response(
    status: int, message: str, hint: str | None = None, param: str | None = None, headers: Any = None
) -> Response:
    return AsciiJSONResponse(error_body(status, message, hint, param), status_code=status, headers=headers)


def error_body(status: int, message: str, hint: str | None, param: str | None) -> dict[str, Any]:
    """OpenAI's error object, which its clients turn into exceptions."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    text = message if hint is None else f"{message}\n\nhint: {hint}"
    return {"error": {"message": text, "type": kind, "param": param, "code": None}}


async def on_error(request: Request, error: Exception) -> Response:
    """The answer to a request that failed in a way that was foreseen."""
    if isinstance(error, RequestValidationError):
        return _invalid(request, error)
    if isinstance(error, HTTPException):
        return error_response(error.status_code, str(error.detail), headers=error.headers)
    param = error.field if isinstance(error, RequestError) else None
    headers = {"retry-after": "1"} if error.http_status == 429 else None
    return error_response(error.http_status, error.message, error.hint, param, headers=headers)


async def on_surprise(request: Request, error: Exception) -> Response:
    return error_response(500, f"an unexpected {type(error).__name__}: this is a bug in the server")


def _invalid(request: Request, error: RequestValidationError) -> Response:
    """A body of the wrong form: which field, and what it must be."""
    details = _telling(error)
    if details["type"] == "json_invalid":
        return error_response(400, f"the body is no valid JSON: {_json_problem(details, error.body)}")
    path = _path(details, error.body)
    if not path and details["type"] == "paceline":  # about the body as a whole
        return error_response(400, details["msg"], param=details.get("ctx", {}).get("name"))
    if not path:
        sent_as = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if isinstance(error.body, bytes) and not sent_as.endswith(_JSON_TYPES):
            what = f"the body was sent as `{sent_as[:60] or 'nothing'}`, and this endpoint takes JSON"
            return error_response(415, what, "send the header `Content-Type: application/json`.")
        return error_response(400, f"the body is no valid JSON object: {details['msg']}")
    if details["type"] != "extra_forbidden":
        return error_response(400, f"`{path}`: {details['msg']}", param=path)
    reason = UNSUPPORTED.get(path)
    if reason is not None:
        return error_response(400, f"`{path}` is not supported here: {reason}", "leave it out.", path)
    hint = "leave it out, or see the server's /openapi.json for what there is."
    return error_response(400, f"`{path}` is not a parameter of this endpoint", hint, path)


def _telling(error: RequestValidationError) -> Any:
    """The finding that says most: our own words, else the one deepest inside the body, where a value that may have
    several forms was read in the form it comes nearest to."""
    found = error.errors()
    ours = [details for details in found if details["type"] == "paceline"]
    first = ours[0] if ours else found[0]
    if ours or len(found) == 1:
        return first
    field = _path(first, error.body).partition(".")[0]
    same = [details for details in found if _path(details, error.body).partition(".")[0] == field]
    return max(same, key=lambda details: len(_path(details, error.body).split(".")))


def _path(details: Any, body: Any) -> str:
    """Where in the body, without the names that validation gives to the forms a value may have."""
    names = [part for part in details["loc"] if part != "body"]
    if details["type"] in ("missing", "extra_forbidden", "value_error") and names:
        *names, last = names
    else:
        last = None
    path, here = [], body
    for name in names:
        inside = isinstance(here, dict) and name in here
        inside = inside or (isinstance(here, list) and isinstance(name, int) and name < len(here))
        if inside:
            path.append(name)
            here = here[name]
    return ".".join(str(part)[:60] for part in (*path, *(() if last is None else (last,))))


def _json_problem(details: Any, body: Any) -> str:
    """What and where, in lines and columns as editors count them."""
    position = details["loc"][-1]
    text = body if isinstance(body, str) else bytes(body or b"").decode("utf-8", "replace")
    what = str(details.get("ctx", {}).get("error", "it cannot be read"))
    if not isinstance(position, int):
        return what
    line, column = text.count("\n", 0, position) + 1, position - text.rfind("\n", 0, position)
    return f"{what} at line {line}, column {column} (character {position})"
