"""What drafts of 1, 2 and 4 layers of the target's width, with a head of 16k tokens, cost beside the target's step.

    .venv/bin/python bench/drafts.py ENGINE

The synthetic drafts are the engine's own first layers and the first 16k tokens of its head: what is timed, a step of
one row, does not depend on what the weights say. Every draft runs twice after a step of the target: as a round's first
draft step, its weights out of the cache, and as the next one. Medians in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from dataclasses import fields, replace
from pathlib import Path

from paceline.build.autotune import CONTEXT, step_seconds, this_machine
from paceline.build.builder import load_weights
from paceline.build.manifest import read_manifest
from paceline.runtime.backends import ModelWeights, open_backend, open_pool

NUM_LAYERS = (1, 2, 4)
VOCAB = 16384


def cut(weights: ModelWeights, num_layers: int) -> ModelWeights:
    """The first layers of a model, and the first VOCAB tokens of its head."""
    a = weights.architecture
    values = {field.name: getattr(a, field.name) for field in fields(a)}
    per_layer = {n: v[:num_layers] for n, v in values.items() if isinstance(v, tuple) and len(v) == a.num_layers}
    tensors = {}
    for name, tensor in weights.tensors.items():
        if name.startswith(("head.", "embedding.")):
            full = -(-weights.vocab_size // 16) * 16
            share = VOCAB if tensor.shape[0] == full else VOCAB // 16
            tensors[name] = tensor[:share]
        elif not name.startswith("layers.") or int(name.split(".")[1]) < num_layers:
            tensors[name] = tensor
    return ModelWeights(replace(a, num_layers=num_layers, **per_layer), tensors, VOCAB, weights.activation_group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    manifest = read_manifest(arguments.engine)
    weights = load_weights(arguments.engine, "target", manifest.target, check=False)
    pool = open_pool(manifest.kernels.compiler, manifest.kernels.num_threads)
    models = {"target": weights} | {f"{n} layers": cut(weights, n) for n in NUM_LAYERS}
    backends = {
        name: open_backend(model, pool=pool, device="cpu", num_blocks=32, max_rows=16, max_seq_len=512)
        for name, model in models.items()
    }
    drafts = [name for name in models if name != "target"]
    samples: dict[str, list[float]] = defaultdict(list)
    for _ in range(arguments.repeats):
        for name in drafts:
            samples["target"].append(step_seconds(backends["target"], 1, CONTEXT))
            for turn in ("first", "next"):
                samples[f"{name}, {turn}"].append(step_seconds(backends[name], 1, CONTEXT))
    print(f"{this_machine().cpu}, {manifest.kernels.num_threads} threads; {manifest.target.source}, one row")
    target = statistics.median(samples["target"])
    for name, taken in samples.items():
        print(f"{name:>15}: {statistics.median(taken) * 1e3:6.2f} ms, {statistics.median(taken) / target:6.1%}")


if __name__ == "__main__":
    main()
