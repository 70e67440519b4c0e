"""The table of measured counts: its format, and that every cell of ours is right."""

from __future__ import annotations

import re
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
sys.path.append(str(PROJECT / "scripts"))

import bench_distributed as bench  # noqa: E402


def rows() -> dict[str, list[str]]:
    text = bench.PAGE.read_text(encoding="utf-8").partition(bench.MARKERS[0])[2].partition(bench.MARKERS[1])[0]
    lines = [line.strip("|").split("|") for line in text.strip().splitlines()]
    assert [cell.strip() for cell in lines[0][1:]] == list(bench.HEADINGS)
    return {title.strip(): [cell.strip() for cell in cells] for title, *cells in lines[2:]}


def test_every_cell_of_ours_is_right():
    found = rows()
    assert len(found) >= 20
    for title, (none, theirs, full, regions) in found.items():
        collectives, body = none.split("; ")
        assert body == "body 1", title
        assert full.split("; ")[1] == regions.split("; ")[1] == "body 2", title
        expected = collectives.replace("gather 2", "gather 3") if "gather recomputed" in title else collectives
        assert regions.split("; ")[0] == expected, title
        assert total(full) <= total(theirs), title
    for schedule in ("interleaved zero-bubble", "ZBV", "DualPipeV"):
        assert found[schedule][1].split("; ")[1] != "body 2", "torch's checkpoint replays more than once there"


def total(cell: str) -> int:
    return sum(int(count) for count in re.findall(r" (\d+)", cell.partition(";")[0]))


def test_a_cell_names_collectives_and_runs():
    counts = {"collectives": {"all_gather": 6, "reduce_scatter": 3}, "bodies": [2.0]}
    assert bench.cell(counts) == "gather 6, scatter 3; body 2"
    assert bench.cell({"collectives": {}, "bodies": [2.0, 2.75]}) == "none; body 2 to 2.75"
    table = bench.format_table({"DDP": dict.fromkeys(bench.RUNS, counts)})
    assert table.splitlines()[2] == "| DDP " + "| gather 6, scatter 3; body 2 " * 4 + "|"


def test_every_file_of_tests_with_cases_is_measured():
    measured = {name for names in bench.SETS.values() for name in names}
    with_cases = {
        path.stem for path in bench.TESTS.glob("test_*.py") if re.search(r"^CASES = ", path.read_text(), re.MULTILINE)
    }
    assert with_cases == measured
