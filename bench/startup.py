"""From nothing to the first token, in fresh processes: with the engine's files in the page cache, and without.

    .venv/bin/python bench/startup.py ENGINE

Prints medians in seconds: the imports, `open_engine`, the first token of a short prompt, and the whole process. The
kernels are compiled before; compiling them is part of the build. "Cold" asks the kernel to forget the engine's files,
not Python's. Writes bench/results/startup-NAME.json with every sample.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from paceline.build.autotune import this_machine
from paceline.build.manifest import read_manifest
from paceline.runtime.backends import open_pool

PARTS = ("import", "open", "first token", "process")
CHILD = """
import json, sys, time
start = time.perf_counter()
from pathlib import Path
from paceline.assemble import open_engine
from paceline.runtime.sampling import SamplingParams
from paceline.runtime.sequence import Request
imported = time.perf_counter()
opened = open_engine(Path(sys.argv[1]))
ready = time.perf_counter()
prompt = tuple(opened.tokenizer.encode("def fibonacci(n):").ids)
opened.engine.generate([Request("1", prompt, SamplingParams(temperature=0, max_tokens=1))])
print(json.dumps([imported - start, ready - imported, time.perf_counter() - ready]))
"""


def forget(folder: Path) -> None:
    """Drop the folder's files from the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def start(folder: Path) -> dict[str, float]:
    """Seconds of each part in a process of its own."""
    began = time.perf_counter()
    result = subprocess.run([sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, check=True)
    return dict(zip(PARTS, [*json.loads(result.stdout), time.perf_counter() - began], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--repeats", type=int, default=4)
    arguments = parser.parse_args()
    manifest, machine = read_manifest(arguments.engine), this_machine()
    open_pool(None, 1, print)
    samples: dict[str, list[dict[str, float]]] = {"warm": [], "cold": []}
    for _ in range(arguments.repeats):
        for kind, taken in samples.items():
            if kind == "cold":
                forget(arguments.engine)
            taken.append(start(arguments.engine))
    print(f"{machine.cpu}, {machine.num_cores} cores; {manifest.target.source}")
    for kind, taken in samples.items():
        medians = ", ".join(f"{part} {statistics.median(s[part] for s in taken):.2f} s" for part in PARTS)
        to_token = statistics.median(s["open"] + s["first token"] for s in taken)
        print(f"{kind}: {medians}; open to first token {to_token:.2f} s")
    name = manifest.served_model_name.split("/")[-1].removesuffix(".gguf")
    path = Path(__file__).parent / "results" / f"startup-{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": machine.model_dump(), "seconds": samples}))


if __name__ == "__main__":
    main()
