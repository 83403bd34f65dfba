"""What quantisation costs: mean KL divergence to float32 and the perplexity ratio, teacher-forced on real text.

    .venv/bin/paceline build CONFIG -o ENGINE
    .venv/bin/paceline build CONFIG -o REFERENCE --set quantization=float32
    .venv/bin/python bench/quality.py ENGINE REFERENCE [--data ../shared/data]

Texts: HumanEval prompts with their solutions, and MT-Bench questions as plain text (skipped where the data
folder is absent, with the built-in sample instead). Every position is scored by both engines on the same tokens.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch

from paceline.assemble import OpenEngine, open_engine
from paceline.runtime.backend import StepBatch

CHUNK = 64
SAMPLE = ["def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n"]


def texts(data: Path, per_set: int) -> dict[str, list[str]]:
    """Texts by data set."""
    found: dict[str, list[str]] = {}
    code, questions = data / "HumanEval.jsonl", data / "mt_bench_question.jsonl"
    if code.exists():
        rows = [json.loads(line) for line in code.read_text().splitlines()]
        found["HumanEval"] = [row["prompt"] + row["canonical_solution"] for row in rows[:per_set]]
    if questions.exists():
        rows = [json.loads(line) for line in questions.read_text().splitlines()]
        # Without the chat template: its fixed words would be most of the tokens, the same ones in every text.
        found["MT-Bench"] = ["\n".join(row["turns"]) for row in rows[:per_set]]
    if not found:
        print(f"no data in {data}: using the built-in sample")
        found["sample"] = SAMPLE
    return found


def logits_of(opened: OpenEngine, tokens: list[int]):
    """Yield float32 logits [rows, vocab] for runs of CHUNK positions."""
    backend = opened.target
    table = np.arange(-(-len(tokens) // backend.block_size), dtype=np.int32)[None]
    for first in range(0, len(tokens), CHUNK):
        part = np.array(tokens[first : first + CHUNK], dtype=np.int32)
        rows = np.arange(len(part), dtype=np.int32)
        yield backend.forward(StepBatch(part, rows + first, np.zeros_like(rows), table, rows))


def compare(opened: OpenEngine, reference: OpenEngine, samples: list[str], max_tokens: int) -> dict[str, float]:
    """Mean KL(reference || engine) per position, and both perplexities."""
    divergence = loss = reference_loss = 0.0
    count = agree = scored = 0
    for text in samples:
        tokens = opened.tokenizer.encode(text).ids[:max_tokens]
        position = 0
        for ours, theirs in zip(logits_of(opened, tokens), logits_of(reference, tokens), strict=True):
            q, p = torch.log_softmax(ours, 1), torch.log_softmax(theirs, 1)
            divergence += float((p.exp() * (p - q)).sum())
            agree += int((q.argmax(1) == p.argmax(1)).sum())
            count += len(p)
            next_tokens = torch.tensor(tokens[position + 1 : position + 1 + len(p)], dtype=torch.int64)
            rows = torch.arange(len(next_tokens))
            loss -= float(q[rows, next_tokens].sum())
            reference_loss -= float(p[rows, next_tokens].sum())
            scored += len(next_tokens)
            position += len(p)
    return {
        "tokens": count,
        "kl": divergence / count,
        "top1_agreement": agree / count,
        "perplexity": math.exp(loss / scored),
        "reference_perplexity": math.exp(reference_loss / scored),
        "perplexity_ratio": math.exp((loss - reference_loss) / scored),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--per-set", type=int, default=80, help="texts of each set")
    parser.add_argument("--max-tokens", type=int, default=512, help="of each text")
    arguments = parser.parse_args()
    opened, reference = (open_engine(path, speculation=False) for path in (arguments.engine, arguments.reference))
    results = {}
    print(
        f"{opened.manifest.target.quantization} against {reference.manifest.target.quantization}: "
        f"{opened.manifest.target.source}"
    )
    for name, samples in texts(arguments.data, arguments.per_set).items():
        results[name] = result = compare(opened, reference, samples, arguments.max_tokens)
        print(
            f"{name:>10}: {result['tokens']} tokens, KL {result['kl']:.5f}, "
            f"top-1 agreement {result['top1_agreement']:.2%}, perplexity {result['perplexity']:.3f} / "
            f"{result['reference_perplexity']:.3f} = {result['perplexity_ratio']:.4f}"
        )
    name = opened.manifest.served_model_name.split("/")[-1].removesuffix(".gguf")
    path = Path(__file__).parent / "results" / f"quality-{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
