"""What compiled checkpoints cannot do, as the contract suite on the compiled engine finds it, is on the page."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from helpers.limits import LIMITS, REPLAY

_TESTS = Path(__file__).parents[1]


def _without_parameters(test: str) -> str:
    return test.partition("[")[0].rpartition("::")[2]


@pytest.mark.parametrize(("marker", "table"), [("contract-limits", LIMITS), ("contract-replay", REPLAY)])
def test_limits_are_documented(marker: str, table: dict[str, tuple[str, ...]]) -> None:
    """The page shows every reason with its tests, and no other."""
    page = (_TESTS.parent / "docs" / "compile.md").read_text(encoding="utf-8")
    text = page.partition(f"<!-- {marker} -->")[2].partition(f"<!-- /{marker} -->")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in text.strip().splitlines()[2:]]
    shown = {
        reason: ", ".join(sorted({f"`{_without_parameters(test)}`" for test in tests}))
        for reason, tests in table.items()
    }
    assert rows == list(shown.items())


def test_limits_are_of_tests_that_exist() -> None:
    there = set()
    for path in (_TESTS / "contract").glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                there.add(node.name)
            elif isinstance(node, ast.ClassDef):
                methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
                there |= {node.name, *(f"{node.name}::{name}" for name in methods)}
    named = {test.partition("[")[0] for table in (LIMITS, REPLAY) for tests in table.values() for test in tests}
    assert named - there == set()
