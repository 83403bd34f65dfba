"""Shared test set-up. Its place here also makes `import tiny_checkpoints` work in every test."""

from __future__ import annotations

import pytest

from tiny_checkpoints import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """`tiny(family, **overrides)` -> (directory, transformers model in float32); each distinct one is made once."""
    made = {}

    def get(family: str, **overrides):
        key = (family, repr(sorted(overrides.items())))
        if key not in made:
            directory = tmp_path_factory.mktemp(family)
            made[key] = (directory, make_tiny(family, directory, **overrides))
        return made[key]

    return get
