"""The page obeys its own content policy and treats the model's words as text; the dashboard asks for what exists."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import paceline.serve
from paceline.runtime.metrics import Metrics

PAGE = Path(paceline.serve.__file__).parent / "page"
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


class _Document(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def _elements() -> list[tuple[str, dict[str, str | None]]]:
    document = _Document()
    document.feed((PAGE / "index.html").read_text())
    return document.elements


def _script() -> str:
    return (PAGE / "page.js").read_text()


def test_every_file_the_page_names_is_there():
    named = {a.get("src") or a.get("href") for tag, a in _elements() if tag in ("script", "link")} - {"data:,"}
    assert named == {"page/page.js", "page/page.css"}
    assert all((PAGE.parent / name).is_file() for name in named)


def test_nothing_comes_from_elsewhere():
    for name in ("index.html", "page.css", "page.js"):
        assert not re.search(r"https?:|[\"'(]//|@import|url\(", (PAGE / name).read_text()), name


def test_the_content_policy_is_met():
    for tag, attributes in _elements():
        assert tag != "style" and "style" not in attributes, (tag, attributes)
        assert tag != "script" or attributes.get("src"), "inline script"
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    assert not re.search(r"\beval\b|new Function|setAttribute\(\"(style|on)|set(Timeout|Interval)\([\"'`]", _script())


def test_text_is_never_taken_for_markup():
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|setHTML", _script())


def test_the_script_asks_only_for_elements_that_exist():
    known = {attributes["id"] for _, attributes in _elements() if "id" in attributes}
    asked = set(re.findall(r"\b(?:element|number)\(\"([^\"]+)\"\)", _script()))
    assert asked and asked <= known


def test_every_field_has_a_name_for_screen_readers():
    html = (PAGE / "index.html").read_text()
    for field in re.findall(r"<(?:input|select|textarea)[^>]*>", html):
        labelled = re.search(r"<label[^>]*>(?:(?!</label>).)*" + re.escape(field), html, re.S)
        assert labelled or "aria-label=" in field, field


def test_dashboard_asks_only_for_metrics_that_are_exported():
    exported = set()
    for family in Metrics().families():
        suffixes = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}[family.kind]
        exported |= {family.name + suffix for suffix in suffixes}
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["schemaVersion"] >= 36 and dashboard["panels"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in dashboard["panels"]:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            asked = set(re.findall(r"paceline:\w+", target["expr"]))
            assert asked and asked <= exported, (panel["title"], asked - exported)
