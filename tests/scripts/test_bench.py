"""The benchmarks: sums on paper, tables and verdicts, and one short real run of each."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PROJECT = Path(__file__).resolve().parents[2]
SCRIPTS = PROJECT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import bench_common  # noqa: E402
import bench_memory  # noqa: E402
import bench_memory_cases as memory_cases  # noqa: E402
import bench_overhead  # noqa: E402
import bench_overhead_cases as overhead_cases  # noqa: E402
from bench_memory_cases import Measured, Model, Shape, measure  # noqa: E402

TINY = Shape(batch=1, seq=2, dim=4, heads=2, hidden=8, layers=3)


class TestPaper:
    """The sums from shapes, by hand and against what is really kept."""

    @pytest.mark.parametrize(
        ("case", "by_hand"),
        [
            (memory_cases.TORCH, 3 * 32),
            (memory_cases.SAVED, 3 * (32 + 32 + 16 + 32 + 64 + 64)),
            (memory_cases.ANNOTATED, 3 * (32 + 32 + 16 + 32 + 64 + 64 + 32)),
            (memory_cases.SAC, 3 * (32 + 3 * 32 + 32 + 16 + 32 + 2 * 64 + 32)),
        ],
    )
    def test_sum_by_hand(self, case: str, by_hand: int) -> None:
        assert bench_memory.paper_bytes(case, TINY) == by_hand

    def test_log_sum_exp_is_float32_whatever_the_elements(self) -> None:
        halves = Shape(batch=1, seq=2, dim=4, heads=2, hidden=8, layers=3, element_bytes=2)
        assert bench_memory.paper_bytes(memory_cases.SAVED, halves) == 3 * (16 + 16 + 16 + 16 + 32 + 32)

    @pytest.mark.parametrize(
        "shape",
        [
            TINY,
            Shape(batch=2, seq=5, dim=12, heads=3, hidden=20, layers=1),
            Shape(batch=3, seq=7, dim=8, heads=1, hidden=24, layers=2, element_bytes=2),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("case", [memory_cases.TORCH, memory_cases.SAC, memory_cases.SAVED, memory_cases.ANNOTATED])
    def test_what_is_kept_is_the_sum_on_paper(self, case: str, shape: Shape) -> None:
        figures = measure(Model(case, shape))
        assert figures.kept == bench_memory.paper_bytes(case, shape)
        assert figures.peak > figures.kept

    def test_a_tensor_that_somebody_holds_is_counted(self) -> None:
        model = Model(memory_cases.SAVED, TINY)
        held: list[torch.Tensor] = []
        forward = model.forward

        def holding() -> torch.Tensor:
            held[:] = [torch.zeros(10), held[0] if held else torch.zeros(1)]
            return forward()

        model.forward = holding  # type: ignore[method-assign]
        assert measure(model).kept == bench_memory.paper_bytes(memory_cases.SAVED, TINY) + 40

    def test_one_layer_alive_in_backward(self) -> None:
        """What backward adds to the kept bytes does not grow with the layers."""
        few, many = (
            measure(Model(memory_cases.SAVED, Shape(batch=1, seq=8, dim=16, heads=2, hidden=48, layers=layers)))
            for layers in (2, 6)
        )
        assert few.peak - few.kept == many.peak - many.kept

    def test_worker_refuses_other_gradients(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = Model.forward
        monkeypatch.setattr(
            Model, "forward", lambda self: forward(self) * (1 if self._case == memory_cases.PLAIN else 2)
        )
        answer = memory_cases.worker("ours")
        request = {"do": "measure", "case": memory_cases.SAVED, "shape": vars(TINY)}
        assert answer(request) == {"failed": "its gradients differ from those without checkpointing"}


class TestVerdicts:
    """What is concluded from figures."""

    def test_memory_verdict(self) -> None:
        paper = {memory_cases.SAVED: 816, memory_cases.ANNOTATED: 912}
        found = {
            ("ours", memory_cases.PLAIN): Measured(2000, 2000, 2500),
            ("ours", memory_cases.SAC): Measured(1088, 1088, 1500),
            ("ours", memory_cases.SAVED): Measured(816, 816, 1000),
            ("ours", memory_cases.ANNOTATED): Measured(912, 920, 1000),
            ("peer", memory_cases.ANNOTATED): Measured(912, 912, 1000),
        }
        lines, exact = bench_memory.verdict(found, paper, TINY)
        assert exact
        assert lines == [
            "ours, five regions saved: equal to the sum on paper",
            "ours, five regions saved, annotated: equal to the sum on paper",
            "ours keeps 1 tensor(s) [batch, seq, dim] per layer less than 0.2.2 annotated",
            "ours keeps 25.0% less than SAC",
            "torch_remat, five regions saved, annotated: the first step keeps +8 bytes",
        ]

    def test_memory_verdict_one_byte_off(self) -> None:
        found = {
            ("ours", memory_cases.SAVED): Measured(817, 817, 1000),
            ("ours", memory_cases.ANNOTATED): Measured(912, 912, 1000),
        }
        lines, exact = bench_memory.verdict(found, {memory_cases.SAVED: 816, memory_cases.ANNOTATED: 912}, TINY)
        assert not exact
        assert lines[0] == "ours, five regions saved: +1 bytes off"

    def test_ratio_of_medians_and_middle_half_of_rounds(self) -> None:
        rounds = {
            overhead_cases.PLAIN: [[100, 100, 900], [100, 200, 100], [100] * 3, [100] * 3, [100] * 3],
            "case": [[200, 210, 190], [300, 300, 300], [220] * 3, [210] * 3, [5000, 230, 230]],
        }
        figures = bench_overhead.timed(rounds, "case")
        assert (figures.step_us, figures.ratio) == (220, 2.2)
        assert (figures.low, figures.high) == (2.1, 2.3)

    @pytest.mark.parametrize(
        ("none_saved", "saved", "torch_checkpoint", "missed"),
        [
            (210, 210, 300, []),
            (211, 200, 300, ["no region saved: 2.11x, 0.01x over 2.1x"]),
            (200, 205, 205, ["{}: 2.05x, not under torch.utils.checkpoint"]),
        ],
    )
    def test_missed_targets(self, none_saved: int, saved: int, torch_checkpoint: int, missed: list[str]) -> None:
        rounds = {
            overhead_cases.PLAIN: [[100.0]],
            overhead_cases.TORCH: [[torch_checkpoint]],
            overhead_cases.NONE_SAVED: [[none_saved]],
            overhead_cases.THREE_SAVED: [[saved]],
            overhead_cases.ANNOTATED: [[saved]],
        }
        both = (overhead_cases.THREE_SAVED, overhead_cases.ANNOTATED)
        wanted = [line.format(case) for line in missed for case in (both if "{}" in line else ("",))]
        assert bench_overhead.missed_targets(rounds) == wanted

    def test_unit_costs_are_slopes_beyond_no_checkpointing(self) -> None:
        medians = {
            (row.title, column): 10.0
            + row.ops * (2.0 if column == "plain" else 5.0)
            + (100.0 if column == "ours" else 0)
            for row in overhead_cases.SMALL
            for column in ("plain", "ours")
        }
        costs = bench_overhead.unit_costs(medians, "ours")
        assert costs.pop("a checkpoint (2 bare ops replayed)") == 106
        assert len(costs) == 4
        assert set(costs.values()) == {3.0}


class TestTables:
    """Exact text."""

    def test_table(self) -> None:
        assert bench_common.table(("case", "us"), [["a", "1"], ["long name", "1234"]]).split("\n") == [
            "| case      |   us |",
            "| --------- | ---: |",
            "| a         |    1 |",
            "| long name | 1234 |",
        ]

    def test_stack_table_shows_what_fails(self) -> None:
        found: dict[str, Any] = {
            "ours": {
                case: [[100.0 * factor]]
                for factor, case in enumerate(
                    (
                        overhead_cases.PLAIN,
                        overhead_cases.TORCH,
                        overhead_cases.SAC,
                        overhead_cases.NONE_SAVED,
                        overhead_cases.THREE_SAVED,
                        overhead_cases.ANNOTATED,
                        overhead_cases.BITWISE,
                    ),
                    start=1,
                )
            },
            "peer": {overhead_cases.PLAIN: [[50.0]], overhead_cases.NONE_SAVED: [[100.0]]},
        }
        failed = {("peer", overhead_cases.ANNOTATED): "AttributeError: module 'torch._C' has no attribute '_binding'"}
        rows = [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in bench_overhead.stack_table(found, failed).split("\n")
        ]
        assert rows[0] == ["case", "step, us", "of no checkpointing", "middle half", "must be"]
        assert [row[:3] for row in rows[2:]] == [
            ["no checkpointing", "100", "1.00x"],
            ["torch.utils.checkpoint", "200", "2.00x"],
            ["selective (SAC): matmuls, attention saved", "300", "3.00x"],
            ["torch_remat 0.2.2, no region saved", "100", "2.00x"],
            ["torch_remat 0.2.2, three regions saved, annotated", "fails on this build", ""],
            ["torch_remat, no region saved", "400", "4.00x"],
            ["torch_remat, three regions saved", "500", "5.00x"],
            ["torch_remat, three regions saved, annotated", "600", "6.00x"],
            ["torch_remat, three regions saved, values compared", "700", "7.00x"],
        ]

    def test_one_line(self) -> None:
        assert bench_common.one_line(ValueError("first\nsecond")) == "ValueError: first"
        assert bench_common.one_line(ValueError("x" * 50), limit=20) == "ValueError: xxxxx..."


class TestCases:
    """The models of the benchmarks run and are compared before they are timed."""

    def test_every_case_of_ours_runs(self) -> None:
        steps, failed = overhead_cases.stack_cases("ours", blocks=1)
        assert failed == {}
        assert len(steps) == 7
        small, failed = overhead_cases.small_cases("ours")
        assert failed == {}
        assert all(step() > 0 for step in (*steps.values(), *small.values()))

    def test_a_case_with_other_gradients_is_not_timed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = overhead_cases.StackCase._run

        def wrong(case: Any, index: int, block: Any, x: torch.Tensor) -> torch.Tensor:
            return run(case, index, block, x) * (2 if case._own else 1)

        monkeypatch.setattr(overhead_cases.StackCase, "_run", wrong)
        steps, failed = overhead_cases.stack_cases("ours", blocks=1)
        assert set(failed) == set(overhead_cases.OWN_CASES["ours"])
        assert set(failed.values()) == {"its gradients differ from those without checkpointing"}
        assert set(steps) == {overhead_cases.PLAIN, overhead_cases.TORCH, overhead_cases.SAC}


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / name), *arguments], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
def test_overhead_script_prints_its_tables() -> None:
    done = run_script("bench_overhead.py", "--no-peer", "--rounds", "1", "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert "| torch_remat, three regions saved " in done.stdout
    assert "| a further save in a SAVE region " in done.stdout
    assert "fails" not in done.stdout


@pytest.mark.slow
def test_memory_script_checks_the_sum_on_paper() -> None:
    done = run_script("bench_memory.py", "--no-peer", "--check", "--layers", "2", "--seq", "6", "--batch", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal to the sum on paper") == 2


@pytest.mark.slow
def test_a_worker_must_get_the_library_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "torch_remat").symlink_to(PROJECT / "torch_remat")
    with pytest.raises(RuntimeError, match=r"worker peer imported .*, expected the library in"):
        bench_common.Worker(str(SCRIPTS / "bench_memory.py"), "peer", tmp_path)


@pytest.mark.slow
def test_a_worker_that_ends_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "torch_remat.py").write_text("raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="the worker ended with status 3"):
        bench_common.Worker(str(SCRIPTS / "bench_memory.py"), "peer", tmp_path)
