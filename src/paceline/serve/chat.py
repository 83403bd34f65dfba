"""Chat messages to a prompt, by the model's own template, in a sandbox.

Templates are code from strangers: they run in jinja2's immutable sandbox, see only what is passed to them, loop a
bounded number of times, and their failures are the request's, not the server's. The environment offers what Hugging
Face templates expect.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import RequestError

MAX_LOOP_STEPS = 1_000_000  # of one rendering; a conversation takes some per message
MAX_REPEATED = 1 << 20  # items or characters that `*` may make, and bits of what `**` may


class _TemplateRefusal(Exception):
    """A template called raise_exception: the messages are not what it accepts."""


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox bounds a `range`, but not loops within loops, nor what `*` and `**` can make of small things."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        times = right if isinstance(right, int) else left
        if operator == "*" and isinstance(times, int):
            repeated = left if times is right else right
            if hasattr(repeated, "__len__") and len(repeated) * times > MAX_REPEATED:
                raise OverflowError("it repeats something too often")
        elif isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_REPEATED:
            raise OverflowError("it computes too large a number")
        return super().call_binop(context, operator, left, right)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, "_counted", [], [], None, None, lineno=loop.lineno)
            loop.iter.set_environment(self)
        return tree


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    """What every loop of a template runs over: the items, while the rendering has steps left."""
    steps_left = context.resolve("_steps_left")
    for item in items:
        if next(steps_left, None) is None:
            raise OverflowError(f"it loops more than {MAX_LOOP_STEPS} times")
        yield item


def _raise_exception(message: str) -> None:
    raise _TemplateRefusal(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


@lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters |= {"tojson": _to_json, "_counted": _counted}
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(template)


def render_chat(
    template: str | None,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """The prompt for `messages` ({role, content} each), ending where the assistant's answer begins.

    Without `add_generation_prompt` it ends after the last message; with `continue_final_message` (which wants it
    False) within it, after its content, as transformers has it. `variables` (tools, enable_thinking, ...) are passed on
    to the template. Raises RequestError if the model has no template, or if the template refuses the messages or fails
    on them.
    """
    if template is None:
        raise RequestError(
            "this model has no chat template, so it cannot take `messages`",
            hint="send a plain prompt instead (`--prompt` on the command line).",
            field="messages",
        )
    try:
        steps_left = iter(range(MAX_LOOP_STEPS))
        given = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        text = _compile(template).render({**special_tokens, **variables, **given}, _steps_left=steps_left)
    except _TemplateRefusal as error:
        raise RequestError(f"the chat template refuses `messages`: {error}", field="messages") from error
    except Exception as error:  # whatever a stranger's code may raise
        raise RequestError(
            f"the chat template failed on `messages`: {type(error).__name__}: {error}",
            hint="check that each message has a `role` and a `content` the model knows.",
            field="messages",
        ) from error
    return _open_ended(text, messages[-1]) if continue_final_message else text


def _open_ended(text: str, last: Mapping[str, Any]) -> str:
    """A rendered conversation up to the end of its last message's content."""
    content = last.get("content") or ""
    place = text.rfind(content.strip())
    if not content.strip() or place < 0:
        raise RequestError(
            "`continue_final_message` needs a last message with text that the chat template shows.",
            hint="send the beginning of the answer as the last message, with the role `assistant`.",
            field="continue_final_message",
        )
    # Templates that strip a message's blanks leave it without those at its end.
    whole = content.lstrip()
    return text[: place + len(whole)] if text[place:].startswith(whole) else text[: place + len(content.strip())]
