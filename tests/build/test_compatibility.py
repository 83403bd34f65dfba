"""Which drafts may draft for which targets: tokenizers decide, sizes do not."""

from __future__ import annotations

import json
import shutil

import pytest

from engines import Recorder, build_tiny
from paceline.assemble import open_engine
from paceline.build.compatibility import check_draft, check_shapes, model_warnings, tokenizer_size
from paceline.checkpoints.resolve import open_checkpoint
from paceline.errors import CompatibilityError
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.sequence import Request, SpeculationParams


def opened(directory):
    return open_checkpoint(str(directory))


@pytest.fixture
def edited(tiny, tmp_path):
    """A copy of a tiny checkpoint whose tokenizer.json went through a function."""

    def make(change):
        folder = tmp_path / "edited"
        shutil.copytree(tiny("llama")[0], folder)
        document = json.loads((folder / "tokenizer.json").read_text())
        change(document)
        (folder / "tokenizer.json").write_text(json.dumps(document))
        return opened(folder)

    return make


def test_tokenizer_size_is_no_more_than_the_ids_that_mean_something(tiny):
    padded, exact = (opened(tiny("qwen2", vocab_size=size)[0]) for size in (448, 384))
    assert tokenizer_size(padded) == tokenizer_size(exact) <= 384
    assert padded.architecture.vocab_size == 448


def test_differently_padded_pair_works_both_ways(tiny, tmp_path):
    """As Qwen2.5 14B (152064 rows) and 0.5B (151936 rows) do."""
    small = tiny("qwen2", vocab_size=384, num_hidden_layers=1)[0]
    large = tiny("qwen2", vocab_size=448)[0]
    for name, target, draft in (("a", large, small), ("b", small, large)):
        recorder = Recorder()
        options = {"speculation": {"draft": str(draft), "method": "draft", "num_draft_tokens": 3}}
        manifest = build_tiny(target, tmp_path / name, recorder.listener, **options)
        assert any("pad their vocabularies" in text and "harmless" in text for text in recorder.said)
        size = tokenizer_size(opened(target))
        assert manifest.target.vocab_size == manifest.draft.vocab_size == size < 448
        engine = open_engine(tmp_path / name)
        assert engine.target.vocab_size == engine.draft.vocab_size == size, "no logits exist beyond the tokenizer"
        sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        prompt = tuple(engine.tokenizer.encode("def add(").ids)
        plain, speculated = (
            engine.engine.generate([Request(str(on), prompt, sampling, SpeculationParams(enabled=on))])[0]
            for on in (False, True)
        )
        assert plain.token_ids == speculated.token_ids and len(plain.token_ids) == 24
        assert speculated.stats.num_draft_tokens > 0


def test_first_differing_token_is_named(tiny, edited):
    def swap(document):
        vocabulary = document["model"]["vocab"]
        tokens = {token_id: token for token, token_id in vocabulary.items()}
        vocabulary[tokens[5]], vocabulary[tokens[9]] = 9, 5

    draft = edited(swap)
    target = opened(tiny("llama")[0])
    names = {token_id: token for token, token_id in target.tokenizer.get_vocab().items()}
    with pytest.raises(CompatibilityError) as caught:
        check_draft(target, draft)
    assert f"token 5 is `{names[5]}` in the target and `{names[9]}` in the draft" in caught.value.message
    assert "suffix" in caught.value.hint and caught.value.exit_code == 3


def test_build_refuses_a_foreign_draft_before_work(tiny, edited, tmp_path):
    def rename(document):
        vocabulary = document["model"]["vocab"]
        vocabulary["unheard-of"] = vocabulary.pop(next(t for t, i in vocabulary.items() if i == 300))
        document["model"]["merges"] = []

    draft = edited(rename)
    recorder = Recorder()
    options = {"speculation": {"draft": draft.source, "method": "draft"}}
    with pytest.raises(CompatibilityError, match="token 300 is"):
        build_tiny(tiny("llama")[0], tmp_path / "e", recorder.listener, **options)
    assert recorder.stages == [] and not (tmp_path / "e").exists()


def test_same_tokens_split_differently(tiny, edited):
    draft = edited(lambda document: document["model"].update(merges=document["model"]["merges"][::-1]))
    with pytest.raises(CompatibilityError, match="split the same text"):
        check_draft(opened(tiny("llama")[0]), draft)


def test_same_tokens_behind_another_normalizer(tiny, edited):
    draft = edited(lambda document: document.update(normalizer={"type": "Lowercase"}))
    with pytest.raises(CompatibilityError, match="split the same text"):
        check_draft(opened(tiny("llama")[0]), draft)


def test_draft_that_knows_too_few_tokens(tiny, edited):
    def shrink(document):
        vocabulary = document["model"]["vocab"]
        document["model"]["vocab"] = {token: i for token, i in vocabulary.items() if i < 280}
        document["model"]["merges"] = document["model"]["merges"][: 280 - 259]

    with pytest.raises(CompatibilityError, match=r"the draft knows \d+ of the target's \d+ tokens"):
        check_draft(opened(tiny("llama")[0]), edited(shrink))


def test_itself_is_compatible(tiny):
    check_draft(opened(tiny("llama")[0]), opened(tiny("qwen3")[0]))


def test_warnings(tiny):
    target, same, smaller = (opened(tiny("llama", num_hidden_layers=layers)[0]) for layers in (3, 3, 1))
    assert model_warnings(target, None) == []
    small, not_smaller = model_warnings(target, same)
    assert "a draft model rarely pays below 1 B" in small
    assert "is not smaller than the target" in not_smaller
    _, heavy = model_warnings(target, smaller)
    assert "of the target's size" in heavy
    assert "not smaller" in model_warnings(smaller, target)[1]


def test_shapes(tiny):
    check_shapes(opened(tiny("gemma2")[0]))
    with pytest.raises(CompatibilityError, match="intermediate_size 104, and engines need a multiple of 16"):
        check_shapes(opened(tiny("llama", intermediate_size=104)[0]))
