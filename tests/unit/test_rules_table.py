"""RULES.md names every rule, trap and group of tests once, and only tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
EXPECTED = [f"R{n}" for n in range(1, 45)] + [f"T{n}" for n in range(1, 152, 2)]
EXPECTED += [f"S{n}" for n in range(1, 16)]


def rows() -> dict[str, list[str]]:
    """Cells of each line of the tables by its first, which is a rule's, trap's or group's name."""
    found: dict[str, list[str]] = {}
    for line in (TESTS / "RULES.md").read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and re.fullmatch(r"[RTS]\d+", cells[0]):
            assert cells[0] not in found, f"{cells[0]} is there twice"
            found[cells[0]] = cells[1:]
    return found


def names_in(cell: str) -> list[str]:
    """Names of tests in a cell, which holds nothing else."""
    names = re.findall(r"`([^`]+)`", cell)
    assert cell == " ".join(f"`{name}`" for name in names), cell
    return names


def functions(path: Path) -> set[str]:
    """Tests of a file that pytest would collect: functions of the module."""
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_rule_trap_and_group_is_there_once() -> None:
    assert sorted(rows()) == sorted(EXPECTED)


def test_every_line_says_what_we_do_and_names_tests() -> None:
    for name, (*texts, tests) in rows().items():
        assert len(texts) == (2 if name.startswith("T") else 1), name
        assert all(len(text) > 3 for text in texts), name
        assert names_in(tests), f"{name} names no test"


def test_every_test_that_is_named_exists() -> None:
    named = {test for *_, tests in rows().values() for test in names_in(tests)}
    for test in sorted(named):
        file, _, function = test.partition("::")
        assert function.startswith("test_"), test
        assert (TESTS / file).is_file(), test
        assert function in functions(TESTS / file), test


def test_a_rule_in_the_name_of_a_test_has_that_test_in_its_line() -> None:
    """Tests say in their names which rule they hold: the table must not forget one."""
    table, forgotten = rows(), []
    for path in sorted(TESTS.rglob("test_*.py")):
        for function in sorted(functions(path)):
            name = f"{path.relative_to(TESTS)}::{function}"
            said = [f"R{number}" for number in re.findall(r"(?<=_r)\d+(?=_)", function)]
            said += [f"T{number}" for number in re.findall(r"(?<=_trap_)\d+(?=_)", function)]
            forgotten += [(rule, name) for rule in said if name not in names_in(table[rule][-1])]
    assert not forgotten
