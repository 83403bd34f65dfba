"""Prompts of the benches, from the public sets beside the repository or a small sample where those are not."""

from __future__ import annotations

import json
from pathlib import Path

SAMPLE = ["Write a Python function that merges two sorted lists, then repeat it with type hints."]


def prompt_sets(data: Path, count: int) -> dict[str, list[str]]:
    """User messages by set: `HumanEval`, `MT-Bench` (first turns) and `code edit`, at most `count` of each."""
    code, questions = data / "HumanEval.jsonl", data / "mt_bench_question.jsonl"
    if not code.exists() or not questions.exists():
        print(f"no data in {data}: using the built-in sample")
        return {"sample": SAMPLE}
    problems = [json.loads(line) for line in code.read_text().splitlines()][:count]
    turns = [json.loads(line)["turns"][0] for line in questions.read_text().splitlines()]
    return {
        "HumanEval": [f"Complete this function:\n```python\n{p['prompt']}```" for p in problems],
        "MT-Bench": turns[:: max(1, len(turns) // count)][:count],
        "code edit": [
            f"Return this code unchanged, except that `{p['entry_point']}` is renamed to `solution`:\n"
            f"```python\n{p['prompt']}{p['canonical_solution']}```"
            for p in problems
        ],
    }
