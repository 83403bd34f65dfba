from __future__ import annotations

from paceline.config.options import REQUIRED, expectation, field_at, list_options, section_of
from paceline.config.schema import Config, ModelReference


def test_every_option_has_a_doc_a_type_and_a_default_that_is_valid():
    options = list_options()
    assert len({option.path for option in options}) == len(options) > 20
    tree: dict = {}
    for option in options:
        assert option.doc.endswith("."), option.path
        assert "\n" not in option.doc
        assert option.expects != "anything"
        here = tree
        *sections, name = option.path.split(".")
        for section in sections:
            here = here.setdefault(section, {})
        here[name] = "a/b" if option.default is REQUIRED else option.default
    assert Config.model_validate(tree) == Config(model="a/b")


def test_expectations_in_words():
    expects = {option.path: option.expects for option in list_options()}
    assert expects["device"] == "one of `auto`, `cpu`, `cuda`"
    assert expects["max_seq_len"] == "a whole number from 1 to 1048576 (or left out)"
    assert expects["runtime.total_token_limit"] == "a whole number from 1 to 1099511627776 (or `null`)"
    assert expects["runtime.kv_cache_free_mem_fraction"] == "a number above 0 and at most 1 (or left out)"
    assert expects["build.autotune"] == "`true` or `false`"
    assert expects["served_model_name"] == "one line of text (or left out)"


def test_fields_are_found_by_location():
    assert section_of(field_at(Config, ("speculation", "draft"))) is ModelReference
    assert expectation(field_at(Config, ("speculation", "draft", "revision"))) == "one line of text (or left out)"
    assert field_at(Config, ("build", "nothing")) is None
    assert field_at(Config, ("device", "nothing")) is None
    assert field_at(Config, ()) is None
