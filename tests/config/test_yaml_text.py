from __future__ import annotations

import pytest

from paceline.config.yaml_text import MAX_DEPTH, MAX_TEXT_BYTES, parse_yaml
from paceline.errors import ConfigError


def error_of(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f.yaml")
    return str(caught.value)


def test_values_are_yaml_1_2():
    text = "a: off\nb: true\nc: 0.5\nd: 1_000\ne: 010\nf: 1:30\ng: 2024-01-01\nh: ~\ni: 1e3\nj: '5'\nk: .inf\nl:\n"
    assert parse_yaml(text, "f").value == {
        "a": "off", "b": True, "c": 0.5, "d": 1000, "e": "010", "f": "1:30", "g": "2024-01-01", "h": None, "i": 1000.0,
        "j": "5", "k": ".inf", "l": None,
    }  # fmt: skip


def test_lines_of_paths():
    tree = parse_yaml("# c\na:\n  b: 1\n  c:\n  - x\n  - y\n'odd key': 2\n", "f")
    assert (tree.lines["a"], tree.lines["a.b"], tree.lines["a.c.1"]) == (2, 3, 6)
    assert tree.lines['"odd key"'] == 7


def test_anchors_and_merge_keys():
    text = "x: &x {a: 1, b: 2}\ny: &y {b: 3, c: 4}\nm:\n  <<: [*x, *y]\n  c: 5\nn: *x\n"
    value = parse_yaml(text, "f").value
    assert value["m"] == {"a": 1, "b": 2, "c": 5}
    assert value["n"] == {"a": 1, "b": 2}
    assert value["n"] is not value["x"]


def test_duplicate_keys_are_refused():
    assert error_of("a:\n  b: 1\n  b: 2\n") == (
        "`a.b` is given twice, again at line 3 of f.yaml\n\nhint: Keep one of them."
    )
    assert "`1` is given twice" in error_of("1: a\n1: b\n")


def test_not_yaml():
    assert error_of("a: [1, 2\nb: 3\n") == (
        "f.yaml is not valid YAML at line 2, column 2: while parsing a flow sequence, expected ',' or ']', but got "
        "':'\n\n"
        "hint: Check the indentation, the quotes and the space after each colon near there."
    )
    assert "no tabs" in error_of("a:\n\tb: 1\n")
    assert "Keep one document" in error_of("a: 1\n---\nb: 2\n")
    assert error_of("a: \x01\n") == "f.yaml is not text: it has control characters\n\nhint: Give a YAML file."
    assert "undefined alias" in error_of("a: *nothing\n")


def test_tags_are_refused():
    assert error_of("a: !!python/object/apply:os.system ['true']\n") == (
        '`a` has the YAML tag "tag:yaml.org,2002:python/object/apply:os.system" (line 1 of f.yaml), and a config takes '
        "none\n\nhint: Remove the tag."
    )
    for text in ("a: !x 1", "a: !!set {b}", "a: !!binary aGk=", "a: !!int b", "a: !!bool x", "!!omap [a: 1]"):
        error_of(text)
    assert "is a mapping or a list" in error_of("? [a]\n: 1\n")


def test_bombs_end_early():
    laughs = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    laughs += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 20)]
    assert "once its aliases are expanded" in error_of("\n".join(laughs))
    merges = ["a0: &a0 {x: 1}"]
    merges += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 20)]
    assert "once its aliases are expanded" in error_of("\n".join(merges))
    assert "levels deep" in error_of("a: &a [*a]")
    assert "levels deep" in error_of("[" * 50_000)
    assert "levels deep" in error_of("{a: " * 50_000)
    assert "levels deep" in error_of("[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2))
    assert "larger than 256 KiB" in error_of("a" * (MAX_TEXT_BYTES + 1))
    assert isinstance(parse_yaml(f"a: {'9' * 5000}", "f").value["a"], str)
