"""Acceptance of coupled against rejection verification, exactly, over the distributions of a real model.

    .venv/bin/python bench/acceptance.py ENGINE [--draft-layers 20] [--data ../shared/data]

p is the engine's target; q is the same model cut after its first layers (an early exit), the only smaller model at hand
with the same vocabulary. At every position of the texts of quality.py the probability that a token drafted from q is
accepted is computed, not sampled: Σ min(p, q) for rejection, the Gumbel race for coupled (runtime/verify.py), at
T = 0.7 and 1.0.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from paceline.assemble import open_engine
from paceline.build.builder import load_weights
from paceline.runtime.backends import open_backend
from paceline.runtime.verify import expected_acceptance
from quality import CHUNK, logits_of, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--draft-layers", type=int, nargs="*", default=[28, 24])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--per-set", type=int, default=6)
    arguments = parser.parse_args()
    opened = open_engine(arguments.engine, speculation=False)
    weights = load_weights(arguments.engine, "target", opened.manifest.target, check=False)
    print(f"model: {opened.manifest.target.source}, {opened.manifest.target.quantization}; chunks of {CHUNK} positions")
    for layers in arguments.draft_layers:
        cut = replace(weights, architecture=replace(weights.architecture, num_layers=layers))
        backend = open_backend(
            cut, pool=opened.target.pool, device="cpu", num_blocks=64, max_rows=CHUNK, max_seq_len=1024
        )
        draft = replace(opened, target=backend)
        for temperature in (0.7, 1.0):
            rejection, coupled, greedy = [], [], []
            for text in [t for sample in texts(arguments.data, arguments.per_set).values() for t in sample]:
                tokens = opened.tokenizer.encode(text).ids[:256]
                for ours, theirs in zip(logits_of(opened, tokens), logits_of(draft, tokens), strict=True):
                    for p, q in zip(
                        torch.softmax(ours / temperature, 1), torch.softmax(theirs / temperature, 1), strict=True
                    ):
                        r, c = expected_acceptance(p, q)
                        rejection.append(r)
                        coupled.append(c)
                        greedy.append(float(p.argmax() == q.argmax()))
            mean = lambda values: sum(values) / len(values)  # noqa: E731
            print(
                f"first {layers} of {weights.architecture.num_layers} layers, T = {temperature}: "
                f"rejection {mean(rejection):.3f}, "
                f"coupled {mean(coupled):.3f} ({mean(coupled) / mean(rejection):.1%} of it), "
                f"greedy {mean(greedy):.3f}; "
                f"{len(rejection)} positions"
            )


if __name__ == "__main__":
    main()
