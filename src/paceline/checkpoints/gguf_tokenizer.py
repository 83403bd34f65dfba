"""GGUF metadata -> tokenizer, chat template and stop tokens.

Knows how llama.cpp names tokenizer kinds and which `tokenizers` pipeline each one is. Where llama.cpp and Hugging Face
differ (Qwen's NFC normalisation), Hugging Face is followed: it is what the model was trained with. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from paceline.checkpoints.checkpoint import TextSettings
from paceline.checkpoints.gguf_file import scalar
from paceline.errors import CheckpointError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # values of tokenizer.ggml.token_type
_CONVERT_AGAIN = "Convert the model again with a current llama.cpp."
_SPACE = "▁"  # SentencePiece writes a space so

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Pre-tokenizer kind -> the patterns that split text before byte-level BPE, each applied to the pieces the one before it
# left. The names of one row are synonyms in llama.cpp (src/llama-vocab.cpp).
_SPLITS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"): (_LLAMA3,),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"): (_QWEN2,),
    ("tekken",): (_TEKKEN,),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): (r"\p{N}", _GPT2),
    ("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "jais"): (_GPT2,),
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ("falcon",): (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "tekken")  # a word in the vocabulary skips its merges
_BEGINS_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "tekken")  # unless the metadata says otherwise
_NORMALISED = ("qwen2", "deepseek-r1-qwen")

# Control tokens that end a turn, whichever the metadata calls the end of the text (llama.cpp's list).
_END_TOKENS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<end_of_turn>", "<|endoftext|>"}
    | {"<|end_of_text|>", "</s>", "<eos>", "<EOT>"}
)


def read_text_settings(metadata: Mapping[str, Any]) -> TextSettings:
    """Rebuild the tokenizer and gather what goes with it. Raises CheckpointError for kinds we cannot reproduce."""
    model = scalar(metadata, "tokenizer.ggml.model", str)
    tokens = _string_list(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError("`tokenizer.ggml.token_type` does not match `tokenizer.ggml.tokens`", _CONVERT_AGAIN)
    while types and types[-1] == _UNUSED:  # padding of the embedding, not part of the vocabulary
        tokens, types = tokens[:-1], types[:-1]
    if model == "gpt2":
        tokenizer, bos_by_default = _byte_level_bpe(metadata, tokens)
    elif model == "llama":
        if scalar(metadata, "general.architecture", str).startswith("gemma"):
            tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        tokenizer, bos_by_default = _sentencepiece_bpe(metadata, tokens, types), True
    else:
        raise CheckpointError(f"`tokenizer.ggml.model`: {model!r} is not supported", "Supported: gpt2, llama.")
    _add_tokens(tokenizer, tokens, types)
    bos_token_id = _token_id(metadata, "bos", len(tokens))
    eos_token_id = _token_id(metadata, "eos", len(tokens))
    if bos_token_id is not None and scalar(metadata, "tokenizer.ggml.add_bos_token", bool, bos_by_default):
        _prepend(tokenizer, tokens[bos_token_id], bos_token_id)
    ends = {eos_token_id, _token_id(metadata, "eot", len(tokens)), _token_id(metadata, "eom", len(tokens))} - {None}
    ends |= {i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _END_TOKENS}
    special = {
        "bos_token": bos_token_id,
        "eos_token": eos_token_id,
        "pad_token": _token_id(metadata, "padding", len(tokens)),
        "unk_token": _token_id(metadata, "unknown", len(tokens)),
    }
    return TextSettings(
        tokenizer=tokenizer,
        chat_template=scalar(metadata, "tokenizer.chat_template", str, None),
        eos_token_ids=frozenset(ends),
        bos_token_id=bos_token_id,
        special_tokens={name: tokens[token_id] for name, token_id in special.items() if token_id is not None},
        default_sampling={},
    )


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tuple[Tokenizer, bool]:
    kind = scalar(metadata, "tokenizer.ggml.pre", str, None)
    patterns = next((patterns for names, patterns in _SPLITS.items() if kind in names), None)
    if patterns is None:
        known = ", ".join(name for names in _SPLITS for name in names)
        problem = "is missing" if kind is None else f"is {kind!r}, which is not supported"
        raise CheckpointError(f"`tokenizer.ggml.pre` {problem}", f"{_CONVERT_AGAIN} Supported: {known}.")
    merges = [tuple(merge.split(" ", 1)) for merge in _string_list(metadata, "tokenizer.ggml.merges")]
    if any(len(merge) != 2 for merge in merges):
        raise CheckpointError("`tokenizer.ggml.merges` holds an entry that is not a pair", _CONVERT_AGAIN)
    tokenizer = _bpe(tokens, merges, ignore_merges=kind in _WHOLE_WORDS_FIRST)
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    if kind in _NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, kind in _BEGINS_WITH_BOS


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    """SentencePiece's BPE: merge the pair whose result ranks best; bytes stand in for unknown characters."""
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) < len(tokens):
        raise CheckpointError("`tokenizer.ggml.scores` does not match `tokenizer.ggml.tokens`", _CONVERT_AGAIN)
    if scalar(metadata, "general.architecture", str).startswith("gemma"):
        scores = [-position for position in range(len(tokens))]  # Gemma's merges follow token order, not its scores
    unknown = _token_id(metadata, "unknown", len(tokens))
    tokenizer = _bpe(
        tokens,
        _merges_by_score(tokens, scores, types),
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    steps = [normalizers.Replace(" ", _SPACE)]
    decode = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if scalar(metadata, "tokenizer.ggml.add_space_prefix", bool, True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        decode.append(decoders.Strip(content=" ", left=1))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer


def _merges_by_score(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best result first, ties as `transformers` breaks them."""
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    ranked = []
    for token, score, kind in zip(tokens, scores, types, strict=False):
        if kind in (_CONTROL, _UNKNOWN):
            continue
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(ids[left], ids[right], left, right) for left, right in splits if left in ids and right in ids]
        ranked += [(-score, -len(left), -len(right), left, right) for _, _, left, right in sorted(pairs)]
    ranked.sort(key=lambda entry: entry[:3])  # stable
    return [(left, right) for *_, left, right in ranked]


def _bpe(tokens: Sequence[str], merges: list, **options: Any) -> Tokenizer:
    vocabulary: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        vocabulary.setdefault(token, token_id)
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"`tokenizer.ggml.merges` do not fit the vocabulary ({error})", _CONVERT_AGAIN) from error


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens found in the text as a whole, before anything splits it. Those made of spaces are left to the merges."""
    added = []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED) and token.strip(_SPACE):
            added.append(AddedToken(token, special=kind != _USER_DEFINED, normalized=False))
    tokenizer.add_tokens(added)


def _prepend(tokenizer: Tokenizer, token: str, token_id: int) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", f"{token}:1", "$B:1"], special_tokens=[(token, token_id)]
    )


def _token_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = scalar(metadata, key, int, None)
    if token_id is not None and not 0 <= token_id < num_tokens:
        if token_id == 0xFFFFFFFF:  # how some writers say: none
            return None
        raise CheckpointError(f"`{key}` is {token_id}, outside the vocabulary of {num_tokens} tokens", _CONVERT_AGAIN)
    return token_id


def _string_list(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise CheckpointError(f"`{key}` is missing from the GGUF metadata, or no list of strings", _CONVERT_AGAIN)
    return value
