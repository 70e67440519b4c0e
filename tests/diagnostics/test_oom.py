"""Out of memory: what is printed, what is left in a file, and which line allocated a tensor."""

import io
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.events import Hidden
from torch import Tensor

import torch_remat as remat
from torch_remat.diagnostics import allocations, oom

FAIL = Hidden(where=None)


def allocate(where: str) -> None:
    """Run out of memory at the place that the test has chosen."""
    phase = "replay" if remat.is_recomputing() else "forward"
    if FAIL["where"] == f"{where} in {phase}":
        torch.empty(1 << 58)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if FAIL["where"] == "backward":
            torch.empty(1 << 58)
        return grad


def block(x: Tensor) -> Tensor:
    def attention(t: Tensor) -> Tensor:
        allocate("region")
        return torch.tanh(t)

    allocate("body")
    h = remat.region(torch.exp, "keep", recompute=False)(torch.sin(x))
    return torch.exp(remat.region(attention, "attention", recompute=True)(h))


def step(x: Tensor) -> None:
    h = Backward.apply(x)
    for index in range(2):
        h = remat.checkpoint(region_name=f"layers.{index}")(block)(h)
    h.sum().backward()
    if FAIL["where"] == "optimizer":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("where", "first"),
    [
        ("body in forward", "rank 0: out of memory in forward of layers.0"),
        ("region in forward", "rank 0: out of memory in forward of layers.0, in region attention"),
        ("body in replay", "rank 0: out of memory in replay of layers.1"),
        ("region in replay", "rank 0: out of memory in replay of layers.1, in region attention"),
        ("backward", "rank 0: out of memory in backward"),
        ("optimizer", "rank 0: out of memory outside of forward and backward"),
    ],
)
def test_a_step_that_dies_leaves_a_file(where: str, first: str, tmp_path: Path, caplog: Any):
    x = torch.zeros(3, 4, requires_grad=True)
    FAIL["where"] = None
    for _ in range(2):
        step(x)
    FAIL["where"] = where
    with (
        pytest.raises(RuntimeError, match="memory") as caught,
        remat.install_oom_observer(tmp_path / "reports") as reports,
    ):
        step(x)
    assert caught.value is not None
    assert [path.name for path in reports.files] == ["remat_oom_rank0.txt"]
    lines = reports.files[0].read_text().splitlines()
    assert lines[1] == first
    assert "memory" in lines[2]
    assert any(line.startswith("saved for backward: ") for line in lines)
    data = json.loads(reports.files[0].with_suffix(".json").read_text())
    assert data["phase"] == {"optimizer": "outside", "backward": "backward"}.get(where, where.rsplit(maxsplit=1)[-1])
    assert data["memory"]["bytes"] == data["memory"]["region_bytes"] + data["memory"]["outside_bytes"]
    if where.endswith("in replay"):
        assert "layers.0" in "\n".join(lines), "what the layer below keeps is in the report"
        assert data["memory"]["region_bytes"] > 0
    assert [(one.name, one.levelname) for one in caplog.records] == [("torch_remat", "ERROR")]
    assert caplog.messages == [f"{first}; what was kept is in {reports.files[0]}"]
    FAIL["where"] = None
    step(x)


def test_other_errors_leave_no_file(tmp_path: Path):
    with pytest.raises(ValueError, match="mine"), remat.install_oom_observer(tmp_path) as reports:
        raise ValueError("mine")
    assert reports.files == []
    assert list(tmp_path.iterdir()) == []


def test_the_allocators_call_is_passed_on_until_detached(tmp_path: Path):
    reports = remat.install_oom_observer(tmp_path)
    reports.attach()
    try:
        oom._tell(0, 100, 2000, 30)
        assert len(reports.files) == 1, "attached twice, told once"
        assert "OOM on device 0: requested 100 B (device_alloc=2000 B, device_free=30 B)." in (
            reports.files[0].read_text().splitlines()
        )
    finally:
        reports.detach()
    oom._tell(0, 100, 2000, 30)
    assert len(reports.files) == 1


def test_the_rank_is_in_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "3")
    reports = remat.install_oom_observer(tmp_path)
    reports.detach()
    path = reports.write()
    assert path == tmp_path / "remat_oom_rank3.txt"


def test_a_file_that_cannot_be_written_is_no_second_error(tmp_path: Path, caplog: Any):
    (tmp_path / "file").write_text("")
    with pytest.raises(MemoryError), remat.install_oom_observer(tmp_path / "file") as reports:
        raise MemoryError
    assert reports.files == []
    assert "cannot be written" in caplog.text


def test_a_report_that_cannot_be_made_leaves_a_file_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def broken(*args: Any) -> Any:
        raise KeyError("broken")

    monkeypatch.setattr(oom, "saved_tensors_report", broken)
    with pytest.raises(MemoryError), remat.install_oom_observer(tmp_path) as reports:
        raise MemoryError
    text = reports.files[0].read_text()
    assert "rank 0: out of memory, and torch_remat failed to produce its report" in text
    assert "KeyError: 'broken'" in text
    assert [path.name for path in tmp_path.iterdir()] == ["remat_oom_rank0.txt"]


def test_an_annotator_that_raises_costs_its_label_alone(tmp_path: Path):
    def broken(tensor: Tensor) -> str:
        raise KeyError("mine")

    y = remat.checkpoint(region_name="b")(lambda t: remat.region(torch.exp, "e", recompute=False)(t))(
        torch.zeros(3, requires_grad=True)
    )
    with pytest.raises(MemoryError), remat.install_oom_observer(tmp_path, annotate=broken) as reports:
        raise MemoryError
    assert (
        "  12 B  saved.0 (output at idx 0)  (3,)  float32  KeyError: 'mine'"
        in reports.files[0].read_text().splitlines()
    )
    del y


class TestWhichError:
    def test_one_that_was_raised_from_it(self, tmp_path: Path):
        """As stages of a pipeline do."""

        def stage(x: Tensor) -> Tensor:
            try:
                torch.empty(1 << 58)
            except RuntimeError as error:
                raise ValueError("stage 3 failed") from error
            return x

        with pytest.raises(ValueError, match="stage 3"), remat.install_oom_observer(tmp_path) as reports:
            remat.checkpoint(region_name="layers.0")(stage)(torch.zeros(3, requires_grad=True))
        assert reports.files[0].read_text().splitlines()[1] == "rank 0: out of memory in forward of layers.0"

    def test_one_whose_frames_have_been_cleared(self):
        def body(x: Tensor) -> Tensor:
            return x + torch.empty(1 << 58)

        with pytest.raises(RuntimeError) as caught:
            remat.checkpoint(region_name="layers.0")(body)(torch.zeros(3, requires_grad=True))
        assert remat.oom_report(caught.value).checkpoint == "layers.0"
        traceback.clear_frames(caught.value.__traceback__)
        report = remat.oom_report(caught.value)
        assert (report.phase, report.checkpoint) == ("forward", None)

    def test_a_later_one_that_the_allocator_does_not_know(self, tmp_path: Path):
        """The program survived what the allocator told, and dies of something else."""
        with pytest.raises(MemoryError), remat.install_oom_observer(tmp_path) as reports:
            self.told_and_dies(MemoryError())
        assert len(reports.files) == 2
        assert "MemoryError" in reports.files[1].read_text()

    def test_the_one_that_the_allocator_told_is_not_told_again(self, tmp_path: Path):
        with pytest.raises(torch.OutOfMemoryError), remat.install_oom_observer(tmp_path) as reports:
            self.told_and_dies(torch.OutOfMemoryError("CUDA out of memory."))
        assert len(reports.files) == 1

    def told_and_dies(self, error: BaseException) -> None:
        oom._tell(0, 100, 2000, 30)
        raise error


class TestObserver:
    def test_it_prints_one_line_and_the_report(self, capsys: Any):
        y = remat.checkpoint(region_name="b")(lambda t: remat.region(torch.exp, "e", recompute=False)(t))(
            torch.zeros(3, requires_grad=True)
        )
        remat.oom_observer(1, 10, 20, 5)
        out, err = capsys.readouterr()
        lines = err.splitlines()
        assert out == ""
        assert lines[0] == (
            "CUDA OOM on device 1: requested 10 B (device_alloc=20 B, device_free=5 B). "
            "torch_remat saved-for-backward report:"
        )
        assert lines[1] == "saved for backward: 12 B resident -- 1 region(s) 12 B, outside regions 0 B"
        assert "\n".join(lines[1:]) == remat.format_oom_saved_tensors_report()
        del y

    def test_it_works_in_backward_and_in_replay(self, capsys: Any):
        def body(x: Tensor) -> Tensor:
            if remat.is_recomputing():
                remat.oom_observer(0, 1, 2, 3)
            return torch.exp(torch.sin(x))

        x = torch.zeros(3, requires_grad=True)
        x.register_hook(lambda grad: remat.oom_observer(0, 4, 5, 6))
        remat.checkpoint()(body)(x).sum().backward()
        err = capsys.readouterr().err
        assert "requested 1 B" in err
        assert "requested 4 B" in err
        assert "failed to produce" not in err

    def test_it_never_raises(self, capsys: Any, monkeypatch: pytest.MonkeyPatch):
        def broken(*args: Any) -> Any:
            raise KeyError("broken")

        monkeypatch.setattr(oom, "saved_tensors_report", broken)
        remat.oom_observer(0, 1, 2, 3)
        err = capsys.readouterr().err
        assert "failed to produce" in err
        assert "KeyError" in err

    def test_without_a_standard_error_it_does_not_raise(self, monkeypatch: pytest.MonkeyPatch):
        closed = io.StringIO()
        closed.close()
        for stream in (closed, None):
            monkeypatch.setattr(sys, "stderr", stream)
            remat.oom_observer(0, 1, 2, 3)


def frame(filename: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": filename, "line": line, "name": name}


def snapshot_of(tensor: Tensor, frames: list[dict[str, Any]], state: str = "active_allocated") -> dict[str, Any]:
    # A storage smaller than its block would leave addresses in it to other tensors.
    assert tensor.untyped_storage().nbytes() == 512
    address = tensor.untyped_storage().data_ptr()
    blocks = [
        {"address": address - 512, "size": 512, "state": "inactive", "frames": []},
        {"address": address, "size": 512, "state": state, "frames": frames},
    ]
    return {"segments": [{"address": address - 512, "blocks": blocks}]}


class TestAllocations:
    FRAMES = (
        frame("/env/torch/nn/functional.py", 5, "linear"),
        frame("/src/torch_remat/runtime/forward.py", 9, "call"),
        frame("/home/me/model.py", 12, "forward"),
        frame("/home/me/train.py", 3, "main"),
    )

    def test_the_innermost_line_of_the_user(self):
        tensor = torch.zeros(128)
        annotate = remat.memory_snapshot_annotate(snapshot_of(tensor, list(self.FRAMES)))
        assert annotate(tensor) == "model.py:12 forward"
        assert annotate(tensor[3:]) == "model.py:12 forward"

    def test_without_one_the_innermost_of_all(self):
        tensor = torch.zeros(128)
        annotate = remat.memory_snapshot_annotate(snapshot_of(tensor, list(self.FRAMES[:2])))
        assert annotate(tensor) == "functional.py:5"

    @pytest.mark.parametrize("frames", [[], None])
    def test_no_frames_no_label(self, frames: Any):
        tensor = torch.zeros(128)
        assert remat.memory_snapshot_annotate(snapshot_of(tensor, frames))(tensor) is None

    def test_freed_blocks_other_memory_and_odd_tensors_have_none(self):
        tensor = torch.zeros(128)
        freed = snapshot_of(tensor, list(self.FRAMES), "inactive")
        assert remat.memory_snapshot_annotate(freed)(tensor) is None
        annotate = remat.memory_snapshot_annotate(snapshot_of(tensor, list(self.FRAMES)))
        assert annotate(torch.zeros(1000)) is None
        assert annotate(torch.eye(2).to_sparse()) is None

    def test_blocks_without_addresses_follow_each_other(self):
        tensor = torch.zeros(128)
        snapshot = snapshot_of(tensor, list(self.FRAMES))
        for block in snapshot["segments"][0]["blocks"]:
            del block["address"]
        assert remat.memory_snapshot_annotate(snapshot)(tensor) == "model.py:12 forward"

    def test_on_a_build_without_cuda_there_are_no_labels(self):
        if torch.cuda.is_available():
            pytest.skip("CUDA is there")
        assert remat.memory_snapshot_annotate()(torch.zeros(3)) is None
        remat.clear_memory_snapshot_cache()

    def test_a_snapshot_is_fetched_again_when_the_allocator_has_moved(self, monkeypatch: pytest.MonkeyPatch):
        tensor = torch.zeros(128)
        count = {"allocated": 1}
        fetched: list[int] = []

        def fetch() -> Any:
            fetched.append(count["allocated"])
            return snapshot_of(tensor, list(self.FRAMES))

        monkeypatch.setattr(allocations.torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(allocations.torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(allocations.torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(
            allocations.torch.cuda,
            "memory_stats",
            lambda device: {"allocation.all.allocated": count["allocated"], "allocation.all.freed": 0},
        )
        monkeypatch.setattr(allocations.torch.cuda.memory, "_snapshot", fetch)
        remat.clear_memory_snapshot_cache()
        annotate = remat.memory_snapshot_annotate()
        assert [annotate(tensor), annotate(tensor)] == ["model.py:12 forward"] * 2
        assert fetched == [1]
        count["allocated"] = 2
        annotate(tensor)
        assert fetched == [1, 2]
        remat.clear_memory_snapshot_cache()
        annotate(tensor)
        assert fetched == [1, 2, 2]
        remat.clear_memory_snapshot_cache()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_real_allocation_that_fails_leaves_a_file(tmp_path: Path):
    x = torch.zeros(8, device="cuda", requires_grad=True)
    with pytest.raises(torch.OutOfMemoryError), remat.install_oom_observer(tmp_path) as reports:
        remat.checkpoint(region_name="b")(lambda t: t + torch.empty(1 << 60, device="cuda").sum())(x)
    assert "rank 0: out of memory in forward of b" in reports.files[0].read_text()
