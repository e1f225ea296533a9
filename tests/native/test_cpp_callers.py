"""C++ callers: the library installed as a package, the example and the contract's test built against it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from caller_models import write_models
from tinyloop.native import load_model

ROOT = Path(__file__).parents[2]
# Building the library takes a minute or more where nothing has built it yet.
pytestmark = pytest.mark.timeout(900)


def tool(name: str) -> str:
    """A build tool, beside this Python first: a virtual environment need not be on the path."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found, f"{name} is not installed: pip install '.[test]' brings it"
    return found


def cmake(*arguments: str | Path) -> None:
    done = subprocess.run([tool("cmake"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"cmake {arguments}:\n{done.stdout}\n{done.stderr}"


def configure(source: Path, build: Path, *options: str) -> None:
    ninja = f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
    cmake("-S", source, "-B", build, "-G", "Ninja", ninja, *options)


@dataclass(frozen=True)
class Callers:
    prefix: Path
    contract_test: Path
    score: Path


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Callers:
    """Everything built; TINYLOOP_BUILD_DIR may name a build folder in which the library is made already."""
    folder = tmp_path_factory.mktemp("cpp")
    build = Path(os.environ.get("TINYLOOP_BUILD_DIR", folder / "library"))
    if "TINYLOOP_BUILD_DIR" not in os.environ:
        configure(ROOT / "native", build, "-DTINYLOOP_PYTHON=OFF")
        cmake("--build", build)
    cmake("--install", build, "--component", "cxx", "--prefix", folder / "prefix")
    callers = folder / "callers"
    configure(ROOT / "tests" / "native" / "cpp", callers, f"-DCMAKE_PREFIX_PATH={folder / 'prefix'}")
    cmake("--build", callers)
    return Callers(folder / "prefix", callers / "contract_test", callers / "examples" / "score")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_models(tmp_path_factory.mktemp("models"))


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_contract_holds_for_every_family(callers: Callers, models: list[Path], tmp_path: Path) -> None:
    done = run(callers.contract_test, tmp_path, *models)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{len(models)} models, ")


def test_example_prints_what_python_computes(callers: Callers, models: list[Path]) -> None:
    context, continuations = [1, 2, 3, 4, 5], [[6, 7], [8], [9, 10, 11]]
    for path in models:
        lists = [",".join(map(str, ids)) for ids in (context, *continuations)]
        done = run(callers.score, path, *lists)
        assert done.returncode == 0, done.stderr
        with load_model(path, max_seq_len=256) as model:
            prompt_len = len(context) if model.descriptor["prefix_lm"] else 0
            expected = [
                model.score_tokens(np.array(context + ids, np.int32), prompt_len=prompt_len)[
                    len(context) - 1 :
                ].sum(dtype=np.float64)
                for ids in continuations
            ]
        assert done.stdout.splitlines() == [f"{value:.6f}" for value in expected]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("MODEL", "1,2", "3,4000"), 1, "error: cannot run item 0: token id 4000"),
        (("MODEL", "1,2", "3,x"), 1, "error: cannot read the ids '3,x'"),
        (("MODEL", "", "3"), 1, "error: cannot read the ids ''"),
        (("missing.tloop", "1,2", "3"), 1, "missing.tloop"),
        (("MODEL", "1,2"), 2, "usage: "),
    ],
)
def test_example_says_what_is_wrong(
    callers: Callers, models: list[Path], arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = run(callers.score, *(str(models[0]) if value == "MODEL" else value for value in arguments))
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr


def test_package_has_the_public_headers_and_no_others(callers: Callers) -> None:
    headers = {str(path.relative_to(callers.prefix / "include")) for path in callers.prefix.rglob("*.h")}
    public = ROOT / "native" / "include"
    assert headers == {str(path.relative_to(public)) for path in public.rglob("*.h")}
    assert (callers.prefix / "lib" / "libtinyloop.a").is_file()


def test_wheel_has_no_part_of_the_package_for_cpp() -> None:
    files = importlib.metadata.files("tinyloop-pool")
    assert files
    assert not [file for file in files if file.suffix in {".a", ".h", ".cc", ".cmake"}]
