"""Times llama.cpp's steps for bench/steps.py: JSON lines in, JSON lines out. Runs in an environment of its own.

Needs the package llama-cpp-python, built natively (bench/README.md). Knows nothing of Paceline.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path

import llama_cpp as llama


def quiet() -> None:
    callback = llama.llama_log_callback(lambda level, text, data: None)
    quiet.keep = callback
    llama.llama_log_set(callback, ctypes.c_void_p(0))


def requantised(source: Path, kind: str) -> Path:
    """A Q8_0 or Q4_0 copy of `source` beside it, made by llama.cpp itself."""
    target = source.with_name(f"{source.stem}-{kind}.gguf")
    if not target.exists():
        parameters = llama.llama_model_quantize_default_params()
        parameters.ftype = {"Q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_0": llama.LLAMA_FTYPE_MOSTLY_Q4_0}[kind]
        parameters.allow_requantize = True
        parameters.nthread = 2
        part = target.with_suffix(".part")
        if llama.llama_model_quantize(str(source).encode(), str(part).encode(), ctypes.byref(parameters)):
            raise SystemExit(f"llama.cpp could not quantise {source}")
        part.rename(target)
    return target


class Model:
    """A llama.cpp context that can repeat a step of n rows after c cached tokens."""

    def __init__(self, path: Path, num_threads: int, max_context: int):
        parameters = llama.llama_model_default_params()
        self.model = llama.llama_model_load_from_file(str(path).encode(), parameters)
        context = llama.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = max_context, 2048, 512
        context.n_threads = context.n_threads_batch = num_threads
        self.context = llama.llama_init_from_model(self.model, context)
        self.memory = llama.llama_get_memory(self.context)
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(2048, 0, 1)
        self.cached = 0

    def _decode(self, first: int, count: int, all_logits: bool) -> float:
        batch = self.batch
        batch.n_tokens = count
        for i in range(count):
            batch.token[i] = (first + i) * 37 % self.vocab_size
            batch.pos[i] = first + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = all_logits or i == count - 1
        start = time.perf_counter()
        if llama.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        llama.llama_synchronize(self.context)
        return time.perf_counter() - start

    def step(self, rows: int, context: int) -> float:
        """Seconds of one step; the cache is filled to `context` first, untimed, and cut back after."""
        if self.cached != context:
            llama.llama_memory_seq_rm(self.memory, 0, 0, -1)
            for first in range(0, context, 512):
                self._decode(first, min(512, context - first), False)
            self.cached = context
        seconds = self._decode(context, rows, rows <= 64)
        llama.llama_memory_seq_rm(self.memory, 0, context, -1)
        return seconds


def main() -> None:
    source, kind, num_threads, max_context = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    quiet()
    llama.llama_backend_init()
    model = Model(requantised(source, kind), num_threads, max_context)
    info = llama.llama_print_system_info().decode()
    print(json.dumps({"ready": kind, "system": info, "version": llama.__version__}), flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        print(json.dumps({"seconds": model.step(ask["rows"], ask["context"])}), flush=True)


if __name__ == "__main__":
    main()
