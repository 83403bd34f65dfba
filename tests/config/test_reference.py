from __future__ import annotations

from pathlib import Path

from paceline.config.options import list_options
from paceline.config.reference import reference_markdown

DOCUMENT = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_document_is_up_to_date():
    assert DOCUMENT.read_text(encoding="utf-8") == reference_markdown(), (
        "run: .venv/bin/python -m paceline.config.reference > docs/config.md"
    )


def test_every_option_is_documented():
    text = reference_markdown()
    for option in list_options():
        assert f"| `{option.path}` |" in text
