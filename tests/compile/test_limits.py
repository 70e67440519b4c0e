"""What compiled checkpoints cannot do, as the contract suite on the compiled engine finds it, is on the page."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from helpers.limits import GONE_SINCE, LIMITS, REPLAY, described, reason_of

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
        described(reason): ", ".join(sorted({f"`{_without_parameters(test)}`" for test in tests}))
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


@pytest.mark.parametrize("reason", GONE_SINCE)
def test_limits_of_older_torch(reason: str) -> None:
    """A test that torch has mended is expected to fail before that, and to pass from then on, nightly builds too."""
    major, minor = GONE_SINCE[reason]
    since = f"{major}.{minor}"
    for test in LIMITS[reason]:
        assert reason_of(test, f"{major}.{minor - 1}.1+cpu") == f"{reason} (torch before {since})"
        for version in (f"{since}.0.dev20261001+cpu", f"{since}.1", f"{major}.{minor + 1}.0a0"):
            assert reason_of(test, version) is None
    other = next(test for one, tests in LIMITS.items() if one not in GONE_SINCE for test in tests)
    assert reason_of(other, "2.13.0") == reason_of(other, f"{since}.0")
    assert reason_of(other) is not None
