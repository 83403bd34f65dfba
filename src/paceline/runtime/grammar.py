"""What text an output may be: grammars, compiled by llguidance, and where in one a sequence stands.

Knows tokens and which of them may come next. Knows nothing of logits, of how drafts are made, or of HTTP.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Literal

import llguidance
import numpy as np
import tokenizers
from llguidance.gbnf_to_lark import any_to_lark

from paceline.errors import RequestError

MAX_GRAMMAR_CHARACTERS = 65_536
_MAX_NESTING = 64
_MAX_KEPT = 64  # compiled grammars
# With these, hostile grammars took at most 0.6 s to compile and 0.1 s in a step (SmolLM2's tokenizer). An `anyOf` of 40
# objects with 40 optional properties each needs 6680 items in a row, and is refused.
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=4000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
# As Python's json.dumps writes it, and as models have mostly seen it. One spelling of whitespace forces more tokens,
# and a model cannot lose itself in blanks.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True)
class GrammarSpec:
    """A constraint on the whole output text.

    `text` is a JSON schema ("json_schema"), a regular expression that matches the whole output ("regex"), a JSON list
    of strings ("choice"), or a Lark or GBNF grammar ("grammar"); "json_object" has none. `field` names the request's
    parameter in errors, and is no part of what the grammar means.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    text: str = ""
    field: str = "grammar"

    def refusal(self, reason: str) -> RequestError:
        return RequestError(
            f"`{self.field}` cannot be used to constrain the output: {reason}.",
            f"correct or simplify `{self.field}`",
            field=self.field,
        )


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the last ones. Safe to call from any thread: a server compiles
    before it submits, so that the engine's thread finds the grammar ready.

    `vocab_size` is the width of the target's logits. Where `eos_token_ids` is empty an output ends only where its
    grammar allows nothing more, or at `max_tokens`.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, vocab_size: int, eos_token_ids: Collection[int]):
        self._tokenizer = tokenizer
        self._num_token_ids = max(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True))
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = threading.Lock()
        self._ll_tokenizer: llguidance.LLTokenizer | None = None
        self._compiled: OrderedDict[GrammarSpec, llguidance.LLMatcher] = OrderedDict()

    def matcher(self, spec: GrammarSpec) -> GrammarMatcher:
        """A matcher at the start of `spec`. Raises RequestError naming `spec.field` if it cannot be compiled within
        bounds of size and time."""
        with self._lock:
            prototype = self._compiled.get(spec)
        compiled = prototype or self._compile(spec)  # not under the lock: others need not wait for this one
        with self._lock:
            prototype = self._compiled.setdefault(spec, compiled)
            self._compiled.move_to_end(spec)
            if len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
            return GrammarMatcher(prototype.deep_copy(), self._eos_token_ids)

    def _compile(self, spec: GrammarSpec) -> llguidance.LLMatcher:
        try:
            source = _source(spec)
        except Exception as error:  # the converter's parsers have errors of their own
            raise spec.refusal(_one_line(str(error))) from error
        tokens = self._tokens(spec)
        matcher = llguidance.LLMatcher(tokens, source, log_level=0, limits=_LIMITS)
        trial = matcher.deep_copy()
        mask = trial.compute_bitmask()
        if trial.consume_tokens(trial.compute_ff_tokens()):
            trial.compute_bitmask()  # some grammars explode only at their first choice
        for tried in (matcher, trial):
            if tried.is_error():
                raise spec.refusal(_one_line(tried.get_error()))
        allowed = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")
        allowed[tokens.eos_tokens] = 0
        if not allowed.any():
            raise spec.refusal("it allows no text at all")
        return matcher

    def _tokens(self, spec: GrammarSpec) -> llguidance.LLTokenizer:
        if self._ll_tokenizer is None:
            try:
                self._ll_tokenizer = llguidance.LLTokenizer(
                    self._tokenizer.to_str(),
                    n_vocab=self._num_token_ids,
                    eos_token=self._eos_token_ids or [self._num_token_ids - 1],
                )
            except Exception as error:  # the library raises what its parts raise
                raise spec.refusal(f"this model's tokenizer is of an unknown kind ({_one_line(str(error))})") from error
        return self._ll_tokenizer


def _source(spec: GrammarSpec) -> str:
    """`spec` in llguidance's own words. Raises ValueError for what is wrong with its size or form."""
    if len(spec.text) > MAX_GRAMMAR_CHARACTERS:
        raise ValueError(f"it has {len(spec.text)} characters, more than {MAX_GRAMMAR_CHARACTERS}")
    if _nesting(spec.text) > _MAX_NESTING:  # the parsers recurse: deep nesting could overflow the stack
        raise ValueError(f"it is nested more than {_MAX_NESTING} deep")
    if spec.kind == "json_object":
        return llguidance.LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_JSON_OPTIONS)
    if spec.kind == "json_schema":
        return llguidance.LLMatcher.grammar_from_json_schema(spec.text, overrides=_JSON_OPTIONS)
    if spec.kind == "regex":
        return llguidance.LLMatcher.grammar_from_regex(spec.text)
    if spec.kind == "choice":
        choices = json.loads(spec.text)
        return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, choices)))
    return llguidance.LLMatcher.grammar_from_lark(any_to_lark(spec.text))


def _nesting(text: str) -> int:
    """How deep brackets are nested in `text`; those in strings are counted too, which errs on the safe side."""
    deepest = depth = 0
    for bracket in re.findall(r"[\[\](){}]", text):
        depth = depth + 1 if bracket in "[({" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest


def _one_line(text: str) -> str:
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= 300 else line[:297] + "..."


class GrammarMatcher:
    """Where one sequence stands in its grammar. It follows the output tokens one by one (`consume`), and answers for
    drafts that may follow them without moving.

    The end-of-sequence tokens are kept apart from the grammar's: they may come where the text could end. A grammar
    that outgrows its limits while running has `failed`: from then on it refuses to `consume`, and the output is cut.
    """

    def __init__(self, matcher: llguidance.LLMatcher, eos_token_ids: SequenceOf[int]):
        self._matcher = matcher
        self._eos_token_ids = list(eos_token_ids)
        self._masks: dict[tuple[int, ...], np.ndarray] = {}  # by draft prefix, until the next token; packed bits

    @property
    def complete(self) -> bool:
        """The text is whole, and nothing can be added to it."""
        return self._matcher.is_stopped() and not self.failed

    @property
    def failed(self) -> bool:
        return self._matcher.is_error()

    def consume(self, token_id: int) -> bool:
        """Move past an output token that is no end of sequence. False if the grammar has failed or refuses it."""
        self._masks.clear()
        return not self.failed and self._matcher.try_consume_tokens([token_id]) == 1

    def allowed(self, draft_token_ids: SequenceOf[int], width: int) -> np.ndarray | None:
        """Which tokens may follow the output and `draft_token_ids`: bool [width], by token id.

        None where anything may: after a draft that the grammar refuses or that completes it, since nothing that is
        drawn there becomes output; where the grammar has failed; and where no token below `width` is allowed (a draft
        model with a smaller vocabulary).
        """
        prefix = tuple(draft_token_ids)
        packed = self._masks.get(prefix)
        if packed is None:
            packed = self._masks[prefix] = self._packed_mask(prefix)
        bits = np.unpackbits(packed, count=min(width, len(packed) * 8), bitorder="little").astype(bool)
        if len(bits) < width:
            bits = np.pad(bits, (0, width - len(bits)))
        return bits if bits.any() else None

    def permitted(self, draft_token_ids: SequenceOf[int]) -> int:
        """How many of `draft_token_ids` may follow the output, in order. An end of sequence may only be the last, and
        nothing follows the token that completes the grammar."""
        if self.failed:
            return 0
        num_permitted = 0
        for token_id in draft_token_ids:
            if token_id in self._eos_token_ids:
                at_end = self._matcher.is_accepting()
                self._rollback(num_permitted)
                return num_permitted + at_end
            if self._matcher.is_stopped() or self._matcher.try_consume_tokens([token_id]) != 1:
                break
            num_permitted += 1
        self._rollback(num_permitted)
        return num_permitted

    def forced(self) -> list[int]:
        """The tokens that spell the only text the grammar allows next; often none."""
        return [] if self.failed or self._matcher.is_stopped() else self._matcher.compute_ff_tokens()

    def _packed_mask(self, prefix: tuple[int, ...]) -> np.ndarray:
        nothing = np.zeros(0, dtype=np.uint8)
        if self.failed:
            return nothing
        num_consumed = self._matcher.try_consume_tokens(list(prefix)) if prefix else 0
        packed = nothing
        if num_consumed == len(prefix) and not self._matcher.is_stopped():
            packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8).copy()
            if self.failed:
                return nothing
            may_end = self._matcher.is_accepting()
            for token_id in self._eos_token_ids:
                bit = np.uint8(1 << (token_id % 8))
                packed[token_id // 8] = packed[token_id // 8] | bit if may_end else packed[token_id // 8] & ~bit
        self._rollback(num_consumed)
        return packed

    def _rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._matcher.rollback(num_tokens)
