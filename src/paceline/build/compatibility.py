"""Whether a draft can work for a target: their tokenizers must agree, token by token. Their sizes need not.

The flagship pair pads one vocabulary to 152064 rows and the other to 151936 while ids above 151646 mean nothing in
either. Knows tokenizers and parameter counts; knows nothing of files or measurements.
"""

from __future__ import annotations

import json

from paceline.checkpoints.checkpoint import Checkpoint
from paceline.errors import CompatibilityError
from paceline.model.linear import LANES, QUARTET

SMALL_TARGET_PARAMETERS = 1_000_000_000
_PROBE = ' def Add(a, B):\n    return a + B  # NAÏVE naïve ﬁ 漢字 🙂 1234567.89\t"x"\r\n\n  '


def tokenizer_size(checkpoint: Checkpoint) -> int:
    """One more than the highest id that means something, never more than the model has rows."""
    highest = max(checkpoint.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    return min(highest + 1, checkpoint.architecture.vocab_size)


def check_shapes(checkpoint: Checkpoint) -> None:
    """Raise CompatibilityError for sizes that the packed weights of an engine cannot have."""
    a = checkpoint.architecture
    sizes = (
        ("intermediate_size", a.intermediate_size, LANES),
        ("hidden_size", a.hidden_size, QUARTET),
        ("num_heads * head_dim", a.num_heads * a.head_dim, QUARTET),
    )
    for name, size, multiple in sizes:
        if size % multiple:
            raise CompatibilityError(
                f"`{checkpoint.source}` has {name} {size}, and engines need a multiple of {multiple}",
                hint="take another model; those in common use all have such sizes.",
            )


def check_draft(target: Checkpoint, draft: Checkpoint) -> None:
    """Raise CompatibilityError unless every token the draft can propose is the same token to the target."""
    ours, theirs = (c.tokenizer.get_vocab(with_added_tokens=True) for c in (target, draft))
    names = {token_id: token for token, token_id in ours.items()}
    differing = [(i, t) for t, i in theirs.items() if i < draft.architecture.vocab_size and names.get(i, t) != t]
    shared = sum(1 for token, token_id in theirs.items() if names.get(token_id) == token)
    problem = None
    if differing:
        token_id, token = min(differing)
        problem = f"token {token_id} is `{names[token_id]}` in the target and `{token}` in the draft"
    elif shared < 0.9 * len(ours):
        problem = f"the draft knows {shared} of the target's {len(ours)} tokens"
    elif _merges(target) != _merges(draft) or target.tokenizer.encode(_PROBE).ids != draft.tokenizer.encode(_PROBE).ids:
        problem = "they split the same text into different tokens"
    if problem:
        raise CompatibilityError(
            f"the draft `{draft.source}` cannot draft for `{target.source}`: {problem}",
            hint="take a draft of the target's own family, for example Qwen2.5-Coder 0.5B for 14B, "
            "or `speculation: suffix`, which needs no draft model.",
        )


def _merges(checkpoint: Checkpoint) -> list:
    merges = json.loads(checkpoint.tokenizer.to_str())["model"].get("merges") or []
    return [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]


def model_warnings(target: Checkpoint, draft: Checkpoint | None) -> list[str]:
    """What is allowed but rarely wise, in sentences."""
    warnings = []
    if draft is None:
        return warnings
    if target.num_parameters < SMALL_TARGET_PARAMETERS:
        warnings.append(
            f"the target has {target.num_parameters / 1e6:.0f} M parameters: a draft model rarely pays below "
            f"{SMALL_TARGET_PARAMETERS / 1e9:.0f} B; consider `speculation: suffix`."
        )
    if draft.num_parameters >= target.num_parameters:
        warnings.append(
            f"the draft ({draft.num_parameters / 1e6:.0f} M parameters) is not smaller than the target "
            f"({target.num_parameters / 1e6:.0f} M): every round will cost more than plain decoding."
        )
    elif draft.num_parameters * 4 > target.num_parameters:
        warnings.append(
            f"the draft is {draft.num_parameters / target.num_parameters:.0%} of the target's size: drafting will eat "
            "most of what it saves."
        )
    if draft.architecture.vocab_size != target.architecture.vocab_size:
        warnings.append(
            f"the models pad their vocabularies to different sizes (target {target.architecture.vocab_size}, draft "
            f"{draft.architecture.vocab_size}); their tokenizers agree, so this is harmless."
        )
    return warnings
