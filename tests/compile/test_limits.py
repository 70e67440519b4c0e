"""What compiled checkpoints cannot do, as the contract suite on the compiled engine finds it, is on the page."""

from __future__ import annotations

from pathlib import Path

from helpers.limits import LIMITS


def test_limits_are_documented() -> None:
    """The page shows every reason with the tests that fail for it, and no other."""
    page = (Path(__file__).parents[2] / "docs" / "compile.md").read_text(encoding="utf-8")
    table = page.partition("<!-- contract-limits -->")[2].partition("<!-- /contract-limits -->")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.strip().splitlines()[2:]]
    shown = {
        reason: ", ".join(sorted({f"`{test.partition('[')[0].partition('::')[2]}`" for test in tests}))
        for reason, tests in LIMITS.items()
    }
    assert rows == list(shown.items())
