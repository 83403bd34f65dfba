"""Plain against speculated decoding on real prompts, interleaved request by request, and where a round's time goes.

    .venv/bin/paceline build CONFIG -o ENGINE
    .venv/bin/python bench/speculation.py ENGINE [--data ../shared/data]

Prompts: HumanEval through the chat template, MT-Bench first turns, and code edits (return a HumanEval solution with one
change), all greedy; the built-in sample where the data folder is absent. Every pair of outputs is compared token by
token. Prints, per set, the median ratio of decode times, acceptance, tokens per round, prompts where speculation lost,
the orchestration share (everything that is no forward pass) and resident memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import psutil

from paceline.assemble import OpenEngine, open_engine
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.sequence import Request, SpeculationParams
from paceline.serve.chat import render_chat
from prompts import prompt_sets


def complete(opened: OpenEngine, prompt: str, speculation: SpeculationParams, max_tokens: int):
    """Run one request to its end; its output and its decode seconds (after the first token)."""
    text = render_chat(opened.chat_template, [{"role": "user", "content": prompt}], opened.manifest.special_tokens)
    ids = tuple(opened.tokenizer.encode(text, add_special_tokens=False).ids)
    [output] = opened.engine.generate(
        [Request("bench", ids, SamplingParams(temperature=0, max_tokens=max_tokens), speculation)]
    )
    return output, output.stats.finished_at - output.stats.first_token_at


def overhead_share(before: dict[str, float], after: dict[str, float], forward: float) -> float:
    """The part of the steps' time that no forward pass explains. Drafting counts as overhead."""
    spent = {phase: after[phase] - before.get(phase, 0.0) for phase in after}
    total = sum(spent.values())
    return 1.0 - forward / total if total else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--count", type=int, default=12, help="prompts of each set")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument(
        "--gamma", type=int, nargs="*", default=[], help="draft lengths to try; none is the engine's own"
    )
    arguments = parser.parse_args()
    opened = open_engine(arguments.engine)
    manifest = opened.manifest
    print(f"machine: {manifest.machine.cpu}, {manifest.machine.num_cores} cores; model: {manifest.target.source}")
    print(f"engine: {manifest.target.quantization}, {manifest.method}, {manifest.num_draft_tokens} draft tokens")
    results = {}
    for name, prompts in prompt_sets(arguments.data, arguments.count).items():
        for gamma in arguments.gamma or [None]:
            # Afresh each time: what the suffix drafter learnt from the same prompts would flatter the next run.
            opened = open_engine(arguments.engine)
            metrics = opened.engine.metrics
            ratios, rounds, tokens, drafted, accepted, differing = [], 0, 0, 0, 0, 0
            shares = {"plain": [], "speculated": []}
            for prompt in prompts:
                # A first run of one token, so that the prefix cache serves both that follow.
                complete(opened, prompt, SpeculationParams(enabled=False), 1)
                times = {}
                for kind, params in (
                    ("plain", SpeculationParams(enabled=False)), ("speculated", SpeculationParams(True, gamma, None))
                ):  # fmt: skip
                    before = dict(metrics.step_phase_seconds)
                    output, times[kind] = complete(opened, prompt, params, arguments.max_tokens)
                    after = dict(metrics.step_phase_seconds)
                    shares[kind].append(overhead_share(before, after, after["forward"] - before["forward"]))
                    if kind == "plain":
                        expected = output.token_ids
                differing += output.token_ids != expected
                if len(expected) > 8:
                    ratios.append(times["plain"] / times["speculated"])
                rounds += output.stats.num_rounds
                tokens += len(output.token_ids)
                drafted += output.stats.num_draft_tokens
                accepted += output.stats.num_accepted_tokens
            key = f"{name} γ={gamma or manifest.num_draft_tokens}"
            results[key] = {
                "ratios": ratios,
                "tokens": tokens,
                "rounds": rounds,
                "drafted": drafted,
                "accepted": accepted,
            }
            print(
                f"{key:>16}: {statistics.median(ratios):.2f}× plain (min {min(ratios):.2f}, "
                f"max {max(ratios):.2f}, slower on {sum(r < 0.98 for r in ratios)} of {len(ratios)}), "
                f"acceptance {accepted / max(1, drafted):.0%}, "
                f"{tokens / rounds:.2f} tokens per round, outputs differing: {differing}; overhead plain "
                f"{statistics.median(shares['plain']):.1%}, speculated {statistics.median(shares['speculated']):.1%}"
            )
    resident = psutil.Process().memory_info().rss
    print(f"resident memory: {resident / 1e6:.0f} MB; weights {manifest.target.weight_bytes / 1e6:.0f} MB")
    path = (
        Path(__file__).parent
        / "results"
        / f"speculation-{manifest.served_model_name.split('/')[-1].removesuffix('.gguf')}.json"
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
