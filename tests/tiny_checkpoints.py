"""Tiny random checkpoints of every supported family, made by `transformers` itself.

Knows how to build and save them. Knows nothing of Paceline: what it writes is what any user's directory looks like.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3")

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS_TOKEN, EOS_TOKEN = "<|im_start|>", "<|im_end|>"
BOS_TOKEN_ID, EOS_TOKEN_ID = 1, 2
VOCAB_SIZE = 384

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}

_CONFIGS = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 24}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 12}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 12}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}

_CORPUS = (
    "def add(first, second):\n    return first + second\n",
    "for index in range(10):\n    print(index, 'hello world')\n",
    "The quick brown fox jumps over the lazy dog. 0123456789\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n",
    "user assistant system message content the and of to in is that it\n",
)


@functools.cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    return tokenizer.to_str()


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE of at most 384 tokens; ids 0 to 2 are SPECIAL_TOKENS."""
    return Tokenizer.from_str(_tokenizer_json())


def tiny_config(family: str, **overrides) -> transformers.PreTrainedConfig:
    """The `transformers` config of a tiny model of `family`; `overrides` are config fields."""
    config_class, specific = _CONFIGS[family]
    return config_class(**{**_COMMON, **specific, **overrides})


def make_tiny(family: str, directory: Path | str, *, seed: int = 0, max_shard_size: str = "1GB", **overrides):
    """Write a tiny random checkpoint of `family` into `directory`; return its `transformers` model (float32, eval).

    `overrides` are fields of the family's config class. The directory holds config.json, safetensors (sharded by
    `max_shard_size`), generation_config.json, tokenizer.json and tokenizer_config.json with a chat template. Every
    parameter is random, norms and biases too, so that forgetting one shows.
    """
    directory = Path(directory)
    config = tiny_config(family, **overrides)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.3))
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=BOS_TOKEN_ID, eos_token_id=[EOS_TOKEN_ID, 0], pad_token_id=0, do_sample=True, temperature=0.6,
        top_p=0.9,
    )  # fmt: skip
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    write_tokenizer(directory)
    return model


def write_tokenizer(directory: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (chat template included)."""
    (directory / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS_TOKEN,
        "eos_token": EOS_TOKEN,
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 256,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
