"""The contract suite of the eager runtime, inherited: these classes of it with ``torch.compile`` around the checkpoint.

What a compiled checkpoint cannot do is a strict expected failure with its reason; the reasons are the limits in
``docs/compile.md``.
"""

from __future__ import annotations

from pathlib import Path

from contract.test_p1_changes_in_place import TestP1ChangedBetweenForwardAndBackward as TestP1ChangedBetween
from contract.test_p1_changes_in_place import TestP1ChangedInTheBody
from contract.test_p1_same_numbers import TestP1Operations
from contract.test_p2_save_body_runs_once import TestP2SaveBodyRunsOnce
from helpers.compiled import LIMITS

__all__ = ["TestP1ChangedBetween", "TestP1ChangedInTheBody", "TestP1Operations", "TestP2SaveBodyRunsOnce"]


def test_limits_are_documented() -> None:
    """The page shows every expected failure with its reason, and no other."""
    page = (Path(__file__).parents[2] / "docs" / "compile.md").read_text(encoding="utf-8")
    table = page.partition("<!-- contract-limits -->")[2].partition("<!-- /contract-limits -->")[0]
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in table.strip().splitlines()[2:]]
    assert rows == [(f"`{name}`", reason) for name, reason in LIMITS.items()]
