"""A Hugging Face directory -> Checkpoint.

Knows which files such a directory holds and how stored tensor names differ from ours. Knows nothing of the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoints.checkpoint import Checkpoint, LazyTensors
from paceline.checkpoints.hf_config import read_architecture
from paceline.checkpoints.hf_tokenizer import read_text_settings
from paceline.checkpoints.json_files import read_json
from paceline.checkpoints.safetensors_files import read_safetensors
from paceline.errors import CheckpointError

# Gemma 3's checkpoints with a vision tower hold the text model under a prefix (of transformers 4, then of 5).
_TEXT_MODEL_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def open_directory(directory: Path, source: str | None = None) -> Checkpoint:
    """The checkpoint in `directory`; reads configuration, tokenizer and tensor headers, no weights.

    `source` is what the checkpoint calls itself (default: the directory). Raises CheckpointError.
    """
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise CheckpointError(
            f"`{directory}` has no `config.json`", "Name a directory written by `save_pretrained`, or a .gguf file."
        )
    config = read_json(config_path)
    try:
        architecture = read_architecture(config)
    except CheckpointError as error:
        raise CheckpointError(f"`{config_path}`: {error.message}", error.hint) from error
    rename = _renamer(config, architecture.tie_word_embeddings)
    tensors = LazyTensors(read_safetensors(directory, rename))
    text = read_text_settings(directory, config)
    return Checkpoint(source or str(directory.resolve()), architecture, tensors, **vars(text))


def _renamer(config: Mapping[str, Any], tie_word_embeddings: bool) -> Callable[[str], str | None]:
    """Stored name -> our name, or None for what the text model does not use."""
    has_vision = "text_config" in config

    def rename(name: str) -> str | None:
        if has_vision:
            if name.startswith(_VISION_PREFIXES):
                return None
            for prefix, ours in _TEXT_MODEL_PREFIXES.items():
                if name.startswith(prefix):
                    name = ours + name.removeprefix(prefix)
                    break
        if name.endswith(".rotary_emb.inv_freq"):  # old Llama files carry what the configuration already says
            return None
        if name == "lm_head.weight" and tie_word_embeddings:  # a copy of the embedding
            return None
        return name

    return rename
