"""Chat messages to a prompt, by the model's own template, in a sandbox.

Templates are code from strangers: they run in jinja2's immutable sandbox, see only what is passed to them, and their
failures are the request's, not the server's. The environment offers what Hugging Face templates expect.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import RequestError


class _TemplateRefusal(Exception):
    """A template called raise_exception: the messages are not what it accepts."""


def _raise_exception(message: str) -> None:
    raise _TemplateRefusal(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    **variables: Any,
) -> str:
    """The prompt for `messages` ({role, content} each), ending where the assistant's answer begins.

    `variables` (tools, enable_thinking, ...) are passed on to the template. Raises RequestError if the model has no
    template, or if the template refuses the messages or fails on them.
    """
    if template is None:
        raise RequestError(
            "this model has no chat template, so it cannot take `messages`",
            hint="send a plain prompt instead (`--prompt`, or /v1/completions).",
            field="messages",
        )
    try:
        return _compile(template).render(
            messages=list(messages), add_generation_prompt=True, **special_tokens, **variables
        )
    except _TemplateRefusal as error:
        raise RequestError(f"the chat template refuses `messages`: {error}", field="messages") from error
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise RequestError(
            f"the chat template failed on `messages`: {type(error).__name__}: {error}",
            hint="check that each message has a `role` and a `content` the model knows.",
            field="messages",
        ) from error
