"""The thread pool on its own, under ThreadSanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import paceline.kernels

HEADERS = Path(paceline.kernels.__file__).parent
FLAGS = ("-std=c++20", "-O1", "-g", "-pthread", "-fsanitize=thread")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_no_data_races_and_no_lost_work(tmp_path):
    program = tmp_path / "pool_stress"
    source = Path(__file__).with_name("pool_stress.cpp")
    built = subprocess.run(
        ["g++", *FLAGS, f"-I{HEADERS}", str(source), "-o", str(program)], capture_output=True, text=True
    )
    if "cannot find" in built.stderr and "tsan" in built.stderr:
        pytest.skip("ThreadSanitizer is not installed")
    assert built.returncode == 0, built.stderr
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
