"""A plain install brings every package that the sources import."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("native", "workers", "cluster")
# Imported by name when a file needs them; without them there is an error that names the extra.
OPTIONAL = re.compile(r'need\("(\w+)[\w.]*", "(\w+)"')
# The oracle of the engine's tests: nothing that a user runs imports it.
# What only who has the extra imports.
ADAPTERS = {
    "cluster/adapters/harness.py": "lm-eval",
    "cluster/adapters/harness_cli.py": "lm-eval",
    "cluster/adapters/harness_generation.py": "lm-eval",
    "cluster/adapters/ray_data.py": "data",
    "cluster/completion_results.py": "data",
    "cluster/outcomes.py": "data",
    "cluster/row_source.py": "data",
    "cluster/score_results.py": "data",
}
TOOLS_OF_DEVELOPMENT = {f"native/reference/{name}.py" for name in ("layers", "model", "state", "stored")}

# What a user asks for by the name of an extra; the command says so where it is missing.
ROOMS_OF_EXTRAS = {"cluster/http/": "http", "cluster/serve_cli.py": "http"}


# Where the import name is not the distribution's own.
IMPORT_NAMES = {"grpcio": "grpc", "pyyaml": "yaml"}


def names(requirements: list[str]) -> set[str]:
    """Import names of requirements."""
    found = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    plain = {match[0].lower().replace("-", "_") for match in found if match}
    return {IMPORT_NAMES.get(name, name) for name in plain}


def third_party_imports(path: Path) -> set[str]:
    """Top names of absolute imports, wherever in the file they stand."""
    tops: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            tops |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            tops.add(node.module.split(".")[0])
    return tops - set(sys.stdlib_module_names) - {"tinyloop"}


def test_every_optional_package_is_in_the_extra_that_its_error_names() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = {
        match for path in (ROOT / "cluster").rglob("*.py") for match in OPTIONAL.findall(path.read_text())
    }
    assert {package for package, _ in found} == {"pyarrow", "fsspec"}
    for package, extra in found:
        assert package in names(extras[extra]), (package, extra)


def test_every_import_of_the_package_is_a_plain_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plain, extras = names(project["dependencies"]), project["optional-dependencies"]
    imported: set[str] = set()
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        missing = third_party_imports(path) - plain
        for room, extra in ROOMS_OF_EXTRAS.items():
            if name.startswith(room):
                missing -= names(extras[extra])
        if name in ADAPTERS:
            missing -= names(extras[ADAPTERS[name]])
        if name in TOOLS_OF_DEVELOPMENT:
            missing -= names(extras["test"])
        assert not missing, f"{name} imports {sorted(missing)}, which a plain install does not bring"
        imported |= third_party_imports(path)
    # The walk sees imports inside functions too: these stand nowhere else.
    assert {"gguf", "safetensors"} <= imported
