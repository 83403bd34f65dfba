"""One prompt through an engine, plain or speculated, with what it took. Knows engines and prompts; prints nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.assemble import OpenEngine, open_engine
from paceline.build.resolve import Listener
from paceline.errors import RequestError
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.sequence import Request, SpeculationParams
from paceline.serve.chat import render_chat

OnText = Callable[[str, str], None]  # text, origin of the token that completed it
MAX_PROMPT_BYTES = 64 << 20
WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Ask:
    """What to complete and how. Exactly one of `prompt`, `chat` and `file` is given."""

    prompt: str | None = None
    chat: str | None = None
    file: Path | None = None
    speculation: str | None = None
    num_draft_tokens: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """One completion. Times in seconds; `decode_tokens_per_second` counts tokens after the first."""

    text: str
    token_ids: list[int]
    pieces: list[tuple[str, str]]
    finish_reason: str
    num_prompt_tokens: int
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    ttft_seconds: float
    decode_seconds: float

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def decode_tokens_per_second(self) -> float:
        return (self.num_tokens - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    def line(self) -> str:
        text = (
            f"{self.num_tokens} tokens in {self.num_rounds} rounds, {self.decode_tokens_per_second:.1f} tokens/s, "
            f"TTFT {self.ttft_seconds * 1e3:.0f} ms"
        )
        if self.num_draft_tokens:
            text += (
                f", acceptance {self.num_accepted_tokens / self.num_draft_tokens:.0%} ({self.num_accepted_tokens} of "
                f"{self.num_draft_tokens} drafted), {self.num_tokens / max(1, self.num_rounds):.2f} tokens per round"
            )
        return f"{text}, finished by {self.finish_reason}"


@dataclass(frozen=True)
class Comparison:
    """The same request plain and speculated. They must be identical unless sampled without a seed."""

    plain: Result
    speculated: Result
    identical: bool
    must_be_identical: bool
    speedup: float


class Session:
    """An open engine and one request to it. Raises RequestError and engine errors as their owners do."""

    def __init__(self, folder: Path, ask: Ask, say: Callable[[str], None] = lambda text: None):
        self._ask = ask
        text = _prompt_text(ask)
        self._sampling = SamplingParams(**ask.sampling)
        if ask.speculation not in (None, "off", "draft", "suffix", "hybrid"):
            raise RequestError(
                f"`--speculation` must be off, draft, suffix or hybrid, got `{ask.speculation}`", field="speculation"
            )
        # Every run prefills its own prompt: the TTFT shown is that of a prompt never seen.
        self._opened = open_engine(folder, prefix_cache=False, listener=Listener(say=say))
        self._prompt = encode_prompt(self._opened, text, chat=ask.chat is not None)
        self._count = 0
        room = self._opened.manifest.max_seq_len - len(self._prompt)
        if self._sampling.max_tokens is not None and self._sampling.max_tokens > room > 0:
            say(f"note: `max_tokens` {self._sampling.max_tokens} is cut to the {room} that fit into `max_seq_len`.")

    def run(self, on_text: OnText | None = None) -> Result:
        """Complete the prompt as asked."""
        ask = self._ask
        method = None if ask.speculation == "off" else ask.speculation
        return self._complete(SpeculationParams(ask.speculation != "off", ask.num_draft_tokens, method), on_text)

    def compare(
        self, on_plain: OnText | None, on_speculated: OnText | None, between: Callable[[str], None]
    ) -> Comparison:
        """Complete it plain, then speculated; both prefill the whole prompt. First a warm-up token after the prompt's
        beginning, so that neither pays for weights not yet in memory."""
        warm_up = replace(self._sampling, max_tokens=1, min_tokens=0)
        self._complete(SpeculationParams(enabled=False), None, warm_up, self._prompt[:WARM_UP_TOKENS])
        between("plain")
        plain = self._complete(SpeculationParams(enabled=False), on_plain)
        between("speculated")
        method = None if self._ask.speculation in (None, "off") else self._ask.speculation
        speculated = self._complete(SpeculationParams(True, self._ask.num_draft_tokens, method), on_speculated)
        ratio = plain.decode_seconds / speculated.decode_seconds if speculated.decode_seconds > 0 else 1.0
        must = self._sampling.mode != "rejection"
        return Comparison(plain, speculated, plain.token_ids == speculated.token_ids, must, ratio)

    def _complete(
        self,
        speculation: SpeculationParams,
        on_text: OnText | None,
        sampling: SamplingParams | None = None,
        prompt: tuple[int, ...] | None = None,
    ) -> Result:
        engine = self._opened.engine
        prompt = self._prompt if prompt is None else prompt
        self._count += 1
        request = Request(f"generate-{self._count}", prompt, sampling or self._sampling, speculation)
        started = time.perf_counter()
        first = last = started
        engine.submit(request)
        token_ids: list[int] = []
        pieces: list[tuple[str, str]] = []
        output = None
        while engine.has_unfinished:
            for output in engine.step():
                last = time.perf_counter()
                first = last if not token_ids else first
                token_ids += output.token_ids
                for text, origin in zip(output.pieces, output.origins, strict=False):
                    pieces.append((text, origin))
                    if on_text:
                        on_text(text, origin)
        stats = output.stats
        return Result(
            text="".join(text for text, _ in pieces),
            token_ids=token_ids,
            pieces=pieces,
            finish_reason=output.finish_reason.value,
            num_prompt_tokens=len(prompt),
            num_rounds=stats.num_rounds,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_tokens=stats.num_accepted_tokens,
            ttft_seconds=first - started,
            decode_seconds=last - first,
        )


def encode_prompt(opened: OpenEngine, text: str, chat: bool) -> tuple[int, ...]:
    """Token ids of a prompt, or of a user's message through the chat template (which brings its own BOS)."""
    if chat:
        special = opened.manifest.special_tokens
        text = render_chat(opened.chat_template, [{"role": "user", "content": text}], special)
    return tuple(opened.tokenizer.encode(text, add_special_tokens=not chat).ids)


def _prompt_text(ask: Ask) -> str:
    given = [value for value in (ask.prompt, ask.chat, ask.file) if value is not None]
    if len(given) != 1:
        raise RequestError(
            f"exactly one of `--prompt`, `--chat` and `--file` is needed, got {len(given)}",
            hint="for example --prompt 'def fibonacci(n):'.",
            field="prompt",
        )
    try:
        if ask.file is None:
            # Bytes of the command line that are not UTF-8 reach us as surrogates, which no tokenizer takes.
            return given[0].encode("utf-8", "surrogateescape").decode("utf-8")
        content = _read(ask.file)
        if len(content) > MAX_PROMPT_BYTES:
            raise RequestError(
                f"`--file` {ask.file} is larger than {MAX_PROMPT_BYTES >> 20} MiB", hint="shorten it.", field="file"
            )
        return content.decode("utf-8")
    except OSError as error:
        raise RequestError(f"`--file` {ask.file} cannot be read: {error.strerror}", field="file") from error
    except UnicodeDecodeError as error:
        name = "the prompt" if ask.file is None else f"`--file` {ask.file}"
        raise RequestError(
            f"{name} is not UTF-8 text (byte {error.start})", hint="convert it to UTF-8.", field="prompt"
        ) from error


def _read(file: Path) -> bytes:
    """The content of a file or of standard input (`-`), at most one byte more than is allowed."""
    if str(file) == "-":
        return sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    with file.open("rb") as opened:
        return opened.read(MAX_PROMPT_BYTES + 1)
