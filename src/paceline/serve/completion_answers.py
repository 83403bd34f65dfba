"""How /v1/completions spells its answers, whole and in chunks."""

from __future__ import annotations

from typing import Any

from paceline.runtime.detokenize import IncrementalDetokenizer
from paceline.runtime.logprobs import TokenLogprobs
from paceline.runtime.output import SequenceOutput
from paceline.serve.answers import REASONS, Answer


class CompletionAnswer(Answer):
    kind = "text_completion"

    def _empty(self, index: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        if self._shows_logprobs():
            choice["logprobs"] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        return choice

    def _extend(self, index: int, output: SequenceOutput) -> dict[str, Any]:
        choice = self._choices[index]
        text, first = "", self._rounds[index] == 0
        logprobs: dict[str, list[Any]] = {key: [] for key in choice["logprobs"] or ()}
        extras: dict[str, Any] = {}
        if first:
            text = self._echo(index)
            if text and logprobs:
                self._add_prompt_logprobs(logprobs, output.request_id)
            extras = self._prompt_fields(index, output.request_id)
        if not self._job.prompt_only:
            if logprobs:
                self._add_logprobs(logprobs, output, len(choice["text"] + text))
            text += output.text
        for name, values in logprobs.items():
            choice["logprobs"][name] += values
        choice["text"] += text
        choice["finish_reason"] = REASONS.get(output.finish_reason)
        choice.update(extras)
        return {"text": text, "logprobs": logprobs or None, "finish_reason": choice["finish_reason"], **extras}

    def _echo(self, index: int) -> str:
        return self._job.prompts[index // self._job.requests[0].sampling.n] if self._job.prompts else ""

    def _prompt_fields(self, index: int, request_id: str) -> dict[str, Any]:
        """What a choice says of its prompt, once."""
        fields: dict[str, Any] = {}
        if self._job.token_ids:
            request = self._job.requests[index // self._job.requests[0].sampling.n]
            fields["prompt_token_ids"] = list(request.prompt_token_ids)
        if self._job.prompt_logprobs_wanted:
            fields["prompt_logprobs"] = self._prompt_logprobs_of(request_id)
        return fields

    def _add_prompt_logprobs(self, logprobs: dict[str, list[Any]], request_id: str) -> None:
        """Those of an echoed prompt; the first token has none, as nothing comes before it."""
        [request] = [r for r in self._job.requests if r.request_id == request_id]
        detokenizer, offset = IncrementalDetokenizer(self._model.tokenizer, skip_special_tokens=False), 0
        known = self._prompt_logprobs.get(request_id, [None])
        for token_id, entry in zip(request.prompt_token_ids, known, strict=True):
            logprobs["tokens"].append(self._token(token_id))
            logprobs["token_logprobs"].append(None if entry is None else entry.logprob)
            logprobs["top_logprobs"].append(None if entry is None else self._top(entry))
            logprobs["text_offset"].append(offset)
            offset += len(detokenizer.push(token_id))

    def _add_logprobs(self, logprobs: dict[str, list[Any]], output: SequenceOutput, offset: int) -> None:
        for entry, piece in zip(output.logprobs or [], output.pieces, strict=False):
            logprobs["tokens"].append(self._token(entry.token_id))
            logprobs["token_logprobs"].append(entry.logprob)
            logprobs["top_logprobs"].append(self._top(entry))
            logprobs["text_offset"].append(offset)
            offset += len(piece)

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        return {self._token(i): logprob for i, logprob in [*entry.top, (entry.token_id, entry.logprob)]}
