"""The bookkeeping of a device's memory, which needs no device, against a plain model on random walks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_blocks_chunks_and_failures_are_those_of_the_plain_model(tmp_path: Path) -> None:
    compiler = shutil.which("c++")
    assert compiler, "a C++ compiler is needed, as for the engine itself"
    sources = [
        ROOT / "tests" / "native" / "cpp" / "address_space_test.cc",
        ROOT / "native" / "src" / "cuda" / "address_space.cc",
    ]
    program = tmp_path / "address_space_test"
    command = [compiler, "-std=c++20", "-O1", "-I", ROOT / "native" / "src", *sources, "-o", program]
    subprocess.run(command, check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") >= 10, done.stdout
