"""What a grammar does to drafts: it offers the tokens it forces, and cuts the others where it refuses them.

Both leave the output's distribution as it is. The target, masked by the same grammar, judges every draft, and a draft
sampled from q is never cut by what its tokens are: that would change what a rejection is drawn from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.runtime.drafting.drafter import Draft

if TYPE_CHECKING:
    from paceline.runtime.sequence import Sequence


def forced_draft(sequence: Sequence, limit: int) -> Draft:
    """The tokens that alone may come next, at most `limit`: they cost no drafting and are always accepted."""
    if sequence.grammar is None or limit <= 0:
        return Draft()
    token_ids = sequence.grammar.forced()[:limit]
    token_ids = token_ids[: sequence.grammar.permitted(token_ids)]
    return Draft(token_ids, source="forced") if token_ids else Draft()


def permitted_draft(sequence: Sequence, draft: Draft) -> Draft:
    """The draft up to the first token the grammar refuses. One with probabilities is left whole: they were masked when
    it was sampled, and where that was not possible, rejection sees to it."""
    if sequence.grammar is None or draft.probabilities is not None or not len(draft):
        return draft
    length = sequence.grammar.permitted(draft.token_ids)
    return draft if length == len(draft) else Draft(draft.token_ids[:length], source=draft.source)
