"""Compiles the C++ kernels for this machine, once, and loads them. Knows compilers and caches; knows no models.

The library is cached by its sources, the compiler and the CPU's features, so that a moved cache or an upgraded compiler
never runs a stale or foreign binary. Without a compiler the caller falls back to the PyTorch reference, aloud.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from paceline.errors import BuildError

SOURCES = ("decoder.cpp", "sampling.cpp", "bandwidth.cpp")
HEADERS = ("vector.h", "threads.h", "linear.h", "attention.h")
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi", "-fPIC", "-shared", "-pthread")


def find_compiler() -> str | None:
    """Path of a C++ compiler: `$CXX`, else c++, g++, clang++; None if there is none."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    return None


def cpu_features() -> str:
    """The CPU's model and instruction sets as the operating system reports them: one line, for fingerprints."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    found = {line.split(":")[0].strip(): line.split(":", 1)[1].strip() for line in lines if line.startswith(wanted)}
    return " | ".join(f"{key}: {value}" for key, value in sorted(found.items()))


def cache_directory() -> Path:
    """Where compiled kernels are kept: `$XDG_CACHE_HOME` or `~/.cache`, in a folder of our own."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "paceline" / "kernels"


def _native_flag() -> str:
    return "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"


def compile_kernels(
    compiler: str, say: Callable[[str], None] = lambda message: None, defines: tuple[str, ...] = ()
) -> Path:
    """Return the path of the kernels' shared library for this machine, compiling it if it is not cached.

    `say` hears one line when a compilation starts. Raises BuildError with the compiler's own words if it fails.
    """
    folder = Path(__file__).parent
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    command = [*FLAGS, _native_flag(), *(f"-D{name}" for name in defines)]
    key = hashlib.sha256("\0".join([version, cpu_features(), *command]).encode())
    for name in SOURCES + HEADERS:
        key.update((folder / name).read_bytes())
    library = cache_directory() / f"paceline-{key.hexdigest()[:20]}.so"
    if library.exists():
        return library
    say(f"compiling kernels for this CPU with {Path(compiler).name}")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as temporary:
            output = Path(temporary) / library.name
            sources = [str(folder / name) for name in SOURCES]
            result = subprocess.run(
                [compiler, *command, *sources, "-o", str(output)], capture_output=True, text=True, check=False
            )
            if result.returncode != 0:
                raise BuildError(
                    f"`{compiler}` could not compile the kernels:\n{result.stderr.strip()[-2000:]}",
                    hint="Paceline needs a C++20 compiler (g++ >= 11 or clang >= 14); set CXX to choose one.",
                )
            output.replace(library)
    except OSError as error:
        raise BuildError(
            f"cannot write compiled kernels to `{library.parent}`: {error}",
            hint="free some space or set XDG_CACHE_HOME to a writable folder.",
        ) from error
    return library


def load_kernels(library: Path) -> ctypes.CDLL:
    """Load a library made by `compile_kernels` and declare its functions. Raises BuildError if it cannot be loaded."""
    try:
        kernels = ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(
            f"the compiled kernels cannot be loaded: {error}",
            hint=f"remove `{library}`; it will be compiled again. If its disk forbids running programs (noexec), set "
            "XDG_CACHE_HOME to a folder on another one.",
        ) from error
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    rows = [pointer, integer, integer, ctypes.c_int64]  # float32 logits: rows, columns, floats from row to row
    signatures = {
        "paceline_pool_create": ([integer], pointer),
        "paceline_pool_destroy": ([pointer], None),
        "paceline_decoder_create": ([pointer, pointer, pointer], pointer),
        "paceline_decoder_destroy": ([pointer], None),
        "paceline_decoder_forward": ([pointer, pointer], None),
        "paceline_decoder_profile": ([pointer, pointer], None),
        "paceline_linear": ([pointer, pointer, integer, pointer, pointer], None),
        "paceline_argmax": ([*rows, pointer, pointer], None),
        "paceline_gumbel_argmax": ([*rows, pointer, pointer, pointer], None),
        "paceline_logsumexp": ([*rows, pointer, pointer], None),
        "paceline_read": ([pointer, ctypes.c_size_t, pointer], ctypes.c_uint64),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(kernels, name)
        function.argtypes, function.restype = arguments, result
    return kernels
