"""The tokenizer, chat template, special tokens and generation defaults of a Hugging Face directory.

Knows the files they live in and which wins. Knows nothing of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from paceline.checkpoints.checkpoint import TextSettings
from paceline.checkpoints.json_files import read_json_if_present
from paceline.errors import CheckpointError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")


def read_text_settings(directory: Path, config: Mapping[str, Any]) -> TextSettings:
    """Everything in `directory` that concerns text; `config` is the parsed config.json."""
    tokenizer = _read_tokenizer(directory)
    tokenizer_config = read_json_if_present(directory / "tokenizer_config.json")
    generation = read_json_if_present(directory / "generation_config.json")
    special_tokens = _special_tokens(directory, tokenizer_config)
    if "bos_token" in special_tokens or "bos_token" in tokenizer_config:
        bos_token_id = tokenizer.token_to_id(special_tokens.get("bos_token", ""))  # null means: there is none
    else:
        bos_token_id = next(iter(_ids(generation.get("bos_token_id", config.get("bos_token_id")))), None)
    eos_token_ids = set(_ids(generation.get("eos_token_id"))) or set(_ids(config.get("eos_token_id")))
    eos_of_tokenizer = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    if eos_of_tokenizer is not None:
        eos_token_ids.add(eos_of_tokenizer)
    for name, token_id in (("bos_token", bos_token_id), ("eos_token", min(eos_token_ids, default=None))):
        token = None if token_id is None else tokenizer.id_to_token(token_id)
        if token is not None:
            special_tokens.setdefault(name, token)
    return TextSettings(
        tokenizer=tokenizer,
        chat_template=_chat_template(directory, tokenizer_config),
        eos_token_ids=frozenset(eos_token_ids),
        bos_token_id=bos_token_id,
        special_tokens=special_tokens,
        default_sampling=_default_sampling(generation),
    )


def _read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"`{directory}` has no `tokenizer.json`",
            "Make it with transformers: `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`.",
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"`{path}` cannot be read ({error})", "Download this file again.") from error
    tokenizer.no_truncation()  # settings of the training run that some checkpoints still carry
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    fallback = read_json_if_present(directory / "special_tokens_map.json")
    found = {}
    for name in _SPECIAL_TOKENS:
        value = tokenizer_config.get(name, fallback.get(name))
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            found[name] = token
    return found


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The template file wins over the processor's JSON, which wins over tokenizer_config.json, as in transformers."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"`{path}` cannot be read ({error})", "Download this file again.") from error
    in_json = read_json_if_present(directory / "chat_template.json").get("chat_template")
    template = in_json or tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _default_sampling(generation: Mapping[str, Any]) -> dict[str, float]:
    """Recommended parameters. Temperature and truncations count only where sampling is recommended at all."""
    names = ["repetition_penalty"]
    if generation.get("do_sample") is True:
        names += _SAMPLING_FIELDS
    given = {name: generation.get(name) for name in names}
    return {name: value for name, value in given.items() if isinstance(value, int | float)}


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0]
