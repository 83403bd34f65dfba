"""What a client sees of a sequence: its tokens, text and log-probabilities as they come, and where it ends.

Knows nothing of how tokens were found: they are taken one by one, so a run of accepted drafts ends exactly where plain
decoding would have ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

import tokenizers

from paceline.runtime.detokenize import IncrementalDetokenizer, StopStrings
from paceline.runtime.logprobs import TokenLogprobs
from paceline.runtime.sequence import FinishReason, Sequence, SequenceStats


@dataclass
class SequenceOutput:
    """What is new of one choice of a request. Its text may lag behind `token_ids`: it waits for whole characters and
    for stop strings that may have begun. `logprobs` is None unless asked for."""

    request_id: str
    index: int
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # of each token: the text it completed; at the end, what was held
    origins: list[str] = field(default_factory=list)  # of each token: "target", or its draft's source
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # with the first tokens, if asked for
    finish_reason: FinishReason | None = None
    stats: SequenceStats = field(default_factory=SequenceStats)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def joined(outputs: Iterable[SequenceOutput]) -> SequenceOutput:
    """The outputs of one choice, in order, as one."""
    first, *others = outputs
    whole = replace(first, token_ids=[*first.token_ids], pieces=[*first.pieces], origins=[*first.origins])
    whole.logprobs = None if first.logprobs is None else list(first.logprobs)
    for output in others:
        whole.token_ids += output.token_ids
        whole.pieces += output.pieces
        whole.origins += output.origins
        if whole.logprobs is not None:
            whole.logprobs += output.logprobs or []
        whole.finish_reason = output.finish_reason
    return whole


class OutputStream:
    """Appends tokens to a sequence and tells its client. Ends it at an end token, a stop string, where its grammar
    is complete, or at `max_tokens` (which the engine has filled in); "stop" wins where both happen at once. An output
    whose grammar has failed is cut, as by `max_tokens`.

    The token that ends a sequence belongs to `token_ids`, but has no text: end-of-sequence never, a stop token only
    with `include_stop_str_in_output`.
    """

    def __init__(self, sequence: Sequence, tokenizer: tokenizers.Tokenizer, eos_token_ids: Collection[int]):
        sampling = sequence.sampling
        self._sequence = sequence
        self._eos_token_ids = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        self._stop_token_ids = frozenset(sampling.stop_token_ids)
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, sequence.request.prompt_token_ids, sampling.skip_special_tokens
        )
        self._stop_strings = StopStrings(sampling.stop, sampling.include_stop_str_in_output)

    def extend(
        self, token_ids: SequenceOf[int], origins: SequenceOf[str], logprobs: list[TokenLogprobs] | None
    ) -> SequenceOutput:
        """Append `token_ids` as far as the sequence's end, and return what is new. The other arguments run parallel."""
        sequence = self._sequence
        pieces: list[str] = []
        while len(pieces) < len(token_ids) and not sequence.finished:
            pieces.append(self._take(token_ids[len(pieces)]))
        num_taken = len(pieces)
        sequence.origins += origins[:num_taken]
        return self._output(list(token_ids[:num_taken]), pieces, list(origins[:num_taken]), logprobs)

    def cancel(self) -> SequenceOutput:
        """End the sequence here; the text still held back comes now."""
        self._sequence.finish_reason = FinishReason.CANCELLED
        return self._output([], [self._flush()], [], None if self._sequence.sampling.logprobs is None else [])

    def _take(self, token_id: int) -> str:
        """Append one token; returns the text to show."""
        sequence, sampling = self._sequence, self._sequence.sampling
        sequence.token_ids.append(token_id)
        num_output = sequence.num_output_tokens
        if token_id in self._eos_token_ids or token_id in self._stop_token_ids:
            sequence.finish_reason = FinishReason.STOP
            shown = sampling.include_stop_str_in_output and token_id not in self._eos_token_ids
            return self._stop_strings.flush() + (self._detokenizer.push(token_id) if shown else "") + self._flush()
        text = self._detokenizer.push(token_id)
        text, stopped = self._stop_strings.push(text, may_stop=num_output >= sampling.min_tokens)
        grammar = sequence.grammar
        follows = grammar is None or grammar.consume(token_id)
        if stopped:
            sequence.finish_reason = FinishReason.STOP
        elif grammar is not None and grammar.complete:
            sequence.finish_reason = FinishReason.STOP
            text += self._flush()
        elif num_output >= sampling.max_tokens or not follows:
            sequence.finish_reason = FinishReason.LENGTH
            text += self._flush()
        return text

    def _flush(self) -> str:
        return self._stop_strings.flush() + self._detokenizer.flush()

    def _output(
        self, token_ids: list[int], pieces: list[str], origins: list[str], logprobs: list[TokenLogprobs] | None
    ) -> SequenceOutput:
        sequence = self._sequence
        return SequenceOutput(
            request_id=sequence.request.request_id,
            index=sequence.index,
            token_ids=token_ids,
            pieces=pieces,
            origins=origins,
            logprobs=None if logprobs is None else logprobs[: len(token_ids)],
            finish_reason=sequence.finish_reason,
            stats=sequence.stats,
        )
