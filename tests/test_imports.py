"""The one-way layering of the design, read off the imports themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "paceline"

# What each part may import of ours besides itself and `errors`. A part is a package, or a module beside them.
ALLOWED = {
    "errors": set(),
    "config": set(),
    "model": set(),
    "kernels": set(),
    "checkpoints": {"model"},
    "runtime": {"model", "kernels"},
    "build": {"checkpoints", "config", "kernels", "model", "runtime", "version"},
    "assemble": {"build", "config", "runtime"},
    "serve": {"runtime", "version"},
    "generate": {"assemble", "build", "runtime", "serve"},
    "serving": {"assemble", "build", "config", "runtime", "serve"},
    "cli": {"assemble", "build", "config", "generate", "serve", "serving", "version"},
}
# Later parts of the design, checked once they exist.
ALLOWED |= {
    "tune": {"runtime", "build", "config"},
    "launch": {"config"},
    "bench": set(),
}


def part_of(module: str) -> str:
    """The part a dotted name of ours belongs to; the bare package is its version."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "version"


def imports(path: Path, for_types: bool = True) -> set[str]:
    """Dotted names of ours that a file imports, at any depth; those under `TYPE_CHECKING` only with `for_types`."""
    found = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not for_types:
        tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            is_part = [(SOURCE.parent / name.replace(".", "/")).with_suffix(".py").exists() for name in names]
            found |= {name if is_module else node.module for name, is_module in zip(names, is_part, strict=True)}
            found |= {name for name in names if (SOURCE.parent / name.replace(".", "/")).is_dir()}
    return {name for name in found if name.split(".")[0] == "paceline"}


def modules() -> dict[str, Path]:
    paths = sorted(SOURCE.rglob("*.py"))
    named = {".".join(path.relative_to(SOURCE.parent).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


def parts() -> list[str]:
    return sorted({part_of(name) for name in modules()} - {"version"})


def test_every_part_is_known():
    assert set(parts()) <= ALLOWED.keys(), "a new part needs its place in the layering"


@pytest.mark.parametrize("part", parts())
def test_imports_run_one_way(part):
    allowed = ALLOWED[part] | {part, "errors"}
    for name, path in modules().items():
        if part_of(name) == part:
            wrong = {target for target in imports(path) if part_of(target) not in allowed}
            assert not wrong, f"{name} imports {sorted(wrong)}"


def test_the_layering_itself_has_no_cycle():
    seen: dict[str, bool] = {}

    def visit(part: str) -> None:
        assert seen.get(part) is not False, f"a cycle through {part}"
        if part not in seen:
            seen[part] = False
            for target in ALLOWED.get(part, ()):
                visit(target)
            seen[part] = True

    for part in ALLOWED:
        visit(part)


def test_modules_have_no_cycle():
    graph = {name: imports(path, for_types=False) & modules().keys() - {name} for name, path in modules().items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " → ".join([*trail, name])
        if name not in done:
            for target in graph[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_the_readers_of_imports_see_them():
    """So that the tests above cannot pass by seeing nothing."""
    assert "paceline.build.builder" in imports(SOURCE / "assemble.py")
    assert "paceline.build.autotune" in imports(SOURCE / "build" / "builder.py")
    inside = imports(SOURCE / "cli" / "build.py")
    assert {"paceline.build.builder", "paceline.config"} <= inside, "inside functions too"


def test_config_and_command_line_load_no_torch():
    code = (
        "import sys, paceline.cli, paceline.config, paceline.errors\n"
        "assert not {'torch', 'numpy', 'tokenizers'} & sys.modules.keys(), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_importing_does_no_work():
    """No file is written, no process or thread started, no connection made by importing everything."""
    names = sorted(name for name in modules() if not name.endswith("__main__"))
    code = f"""
import importlib, sys, threading
import torch, huggingface_hub, gguf, psutil, tokenizers, jinja2, typer, rich.console, rich.progress, safetensors
import pydantic, yaml
def hook(event, arguments):
    if event in ("subprocess.Popen", "os.system", "socket.connect", "os.mkdir", "os.remove", "os.rename"):
        raise AssertionError((event, arguments))
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        if "__pycache__" not in str(arguments[0]):
            raise AssertionError((event, arguments))
before = threading.active_count()
sys.dont_write_bytecode = True
sys.addaudithook(hook)
for name in {names!r}:
    importlib.import_module(name)
assert threading.active_count() == before
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", sorted(modules()))
def test_modules_say_what_they_know(name):
    path = modules()[name]
    text = path.read_text(encoding="utf-8")
    if text.strip() and path.name != "__init__.py":
        assert ast.get_docstring(ast.parse(text)), f"{name} has no docstring"
