"""Things that may stand in one place of the sources alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("native", "workers", "cluster")
# Methods of a tokenizer that turn texts into ids.
ENCODING = {"encode_batch", "encode_batch_fast"}
# The one encoder; the converters look at what a tokenizer does and score nothing.
ENCODERS = {"cluster/encoding.py"}
CONVERTERS = ("native/convert", "native/gguf", "native/huggingface", "native/tokenizer", "native/train")


def sources() -> Iterator[tuple[str, ast.AST]]:
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text())):
                yield name, node


def encodes(node: ast.AST) -> bool:
    """A call of a tokenizer's method, by the method's name or that of what it is called on."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    owner = ast.unparse(node.func.value).lower()
    return node.func.attr in ENCODING or (node.func.attr == "encode" and "tokenizer" in owner)


def test_texts_become_ids_for_scoring_in_one_place() -> None:
    found = {name for name, node in sources() if encodes(node)}
    assert {name for name in found if not name.startswith(CONVERTERS)} == ENCODERS


def test_only_pools_with_a_name_outlive_their_makers() -> None:
    """A detached actor that nobody can name is an orphan that holds its memory."""
    found = {name for name, node in sources() if isinstance(node, ast.Constant) and node.value == "detached"}
    assert found == {"cluster/registry.py"}
