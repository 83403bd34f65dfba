from __future__ import annotations

import json

from paceline.config.explain import explain
from paceline.config.load import parse_config
from paceline.config.options import list_options


def test_one_row_per_option_with_value_and_origin():
    loaded = parse_config(
        "model: {repo: a/b, revision: v1}\nspeculation:\n  draft: package:x\n", "c.yaml", ["max_seq_len=64"],
        {"PACELINE_RUNTIME__ENABLE_PREFIX_CACHE": "no"},
    )  # fmt: skip
    rows = explain(loaded)
    assert [row.path for row in rows] == [option.path for option in list_options()]
    assert [(row.path, row.value, str(row.origin)) for row in rows if row.origin.kind != "default"] == [
        ("model", "a/b@v1", "file c.yaml:1"),
        ("max_seq_len", 64, "command line --set max_seq_len"),
        ("speculation.draft", "package:x", "file c.yaml:3"),
        ("runtime.enable_prefix_cache", False, "environment PACELINE_RUNTIME__ENABLE_PREFIX_CACHE"),
    ]
    json.dumps([row.value for row in rows])  # every value is a JSON scalar


def test_truss_values_show_the_field_they_were_written_as():
    rows = explain(parse_config("trt_llm:\n  build:\n    checkpoint_repository: {repo: a/b}\n", "t.yaml"))
    origins = {row.path: str(row.origin) for row in rows}
    assert origins["model"] == "file t.yaml:3 `trt_llm.build.checkpoint_repository.repo`"
