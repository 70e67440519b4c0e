"""What is written is read back with TensorBoard's own reader, also after a job was killed, and when it goes on."""

import json

import pytest
import torch
from boards import GIB, INPUT, WIDE, Board, batch, event_files, kept_in, stack
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto import event_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import plugin_data_pb2

import torch_remat as remat
from torch_remat_tensorboard import MemoryDashboard
from torch_remat_tensorboard.event_file import EventFile, last_step, scalar
from torch_remat_tensorboard.recording import FILE, read_recording


def train(dashboard, model, steps=3, number=None):
    """Some steps; what the reports say of each."""
    reports = []
    for step in range(steps):
        loss = model(batch()).sum()
        reports.append(remat.saved_tensors_report(loss))
        loss.backward()
        dashboard.step(None if number is None else number + step)
    return reports


def test_lines_read_back_are_what_the_reports_say(tmp_path):
    with MemoryDashboard(tmp_path) as dashboard:
        reports = train(dashboard, stack(3))
    board = Board(tmp_path)
    kept = {step: kept_in(report) for step, report in enumerate(reports, 1)}
    assert kept == {1: 3 * (INPUT + WIDE), 2: 3 * (INPUT + WIDE), 3: 3 * (INPUT + WIDE)}
    assert board.bytes("rank_0", "kept_gib") == kept
    regions = {step: sum(one.bytes for one in report.checkpoints) for step, report in enumerate(reports, 1)}
    assert board.bytes("all_ranks", "region_gib/layers.*::up") == regions
    assert board.line("rank_0", "replays") == {1: 3, 2: 3, 3: 3}
    assert board.line("all_ranks", "worst_rank") == {1: 0, 2: 0, 3: 0}
    assert all(size > 1e-3 for size in board.line("rank_0", "resident_gib").values())
    assert set(board.texts) == {1, 2, 3}
    assert all(text.startswith(f"**Step {step}: rank 0 is the worst") for step, text in board.texts.items())
    assert all(png.startswith(b"\x89PNG") for png in board.images.values())
    assert set(board.images) == {1, 3}  # the first and the last


def test_charts_and_policy_are_there_from_the_first_step(tmp_path):
    with MemoryDashboard(tmp_path, hparams={"model": "stack", "depth": 2}) as dashboard:
        train(dashboard, stack(2), 1)
        board = Board(tmp_path)
    (layout,) = board.events().Tensors("custom_scalars__config__")
    charts = layout_pb2.Layout.FromString(layout.tensor_proto.string_val[0])
    assert charts.category[0].title == "Memory, all ranks"
    content = board.events().SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    values = {name: value.string_value or value.number_value for name, value in start.hparams.items()}
    assert values == {
        "save in layers.*": "up", "recompute in layers.*": "down", "ranks": 1, "model": "stack", "depth": 2,
    }  # fmt: skip


def test_steps_are_there_when_the_call_returns(tmp_path):
    dashboard = MemoryDashboard(tmp_path)
    try:
        for step in (1, 2, 3):
            train(dashboard, stack(1), 1)
            assert max(Board(tmp_path).steps) == step
    finally:
        dashboard.close()


def test_every_so_many_steps_figures_are_those_since_the_last(tmp_path):
    with MemoryDashboard(tmp_path, every=3, image_every=6) as dashboard:
        train(dashboard, stack(2), 12)
    assert Board(tmp_path).line("rank_0", "replays") == {3: 6, 6: 6, 9: 6, 12: 6}
    assert set(Board(tmp_path).images) == {3, 6, 12}


def test_a_job_started_again_goes_on_where_the_run_is(tmp_path):
    for _ in range(2):
        with MemoryDashboard(tmp_path) as dashboard:
            train(dashboard, stack(1), 2)
    assert Board(tmp_path).steps == {1, 2, 3, 4}
    assert len(event_files(tmp_path)) == 2


def test_a_job_that_goes_back_to_a_checkpoint_replaces_what_came_after_it(tmp_path):
    with MemoryDashboard(tmp_path) as dashboard:
        train(dashboard, stack(1), 5, number=1)
    with MemoryDashboard(tmp_path) as dashboard:
        train(dashboard, stack(2), 2, number=4)
    one, two = INPUT + WIDE, 2 * (INPUT + WIDE)
    expected = {1: one, 2: one, 3: one, 4: two, 5: two}
    assert Board(tmp_path).bytes("rank_0", "kept_gib") == expected
    _, steps = read_recording(tmp_path / FILE)
    assert {gathered.step: gathered.samples[0].kept_bytes for gathered in steps} == expected


@pytest.mark.parametrize("cut", [1, 5, 17, 40])
def test_a_file_cut_off_in_the_middle_of_a_record_is_read_and_continued(tmp_path, cut):
    with MemoryDashboard(tmp_path) as dashboard:
        train(dashboard, stack(1), 3)
        (path,) = event_files(tmp_path)
        whole = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(whole - cut)  # in the last step's record
    recording = tmp_path / FILE
    recording.write_bytes(recording.read_bytes()[:-cut])
    assert last_step(tmp_path / "all_ranks") == 2
    with MemoryDashboard(tmp_path) as dashboard:
        train(dashboard, stack(1), 2)
    assert Board(tmp_path).steps == {1, 2, 3, 4}
    _, steps = read_recording(recording)
    assert [gathered.step for gathered in steps] == [1, 2, 3, 4]


def test_the_last_step_of_nothing_is_zero(tmp_path):
    assert last_step(tmp_path) == last_step(tmp_path / "missing") == 0
    EventFile(tmp_path, 1).close()
    assert last_step(tmp_path) == 1
    (tmp_path / "events.out.tfevents.9999999999.other").write_bytes(b"")
    assert last_step(tmp_path) == 0


def test_names_of_event_files_sort_by_session(tmp_path):
    for step in (1, 2, 3):
        file = EventFile(tmp_path, step)
        file.write(step, 0.0, [scalar("a", step)])
        file.close()
    steps = []
    for path in sorted(tmp_path.glob("events*")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert event_pb2.Event.FromString(data[12 : 12 + length]).file_version == "brain.Event:2"
        steps.append(last_step_of(path))
    assert steps == [1, 2, 3]


def last_step_of(path):
    """Of one file, by TensorBoard's reader."""
    return max(event.step for event in EventAccumulator(str(path)).Reload().Scalars("a"))


def test_the_recording_has_the_figures_of_the_charts(tmp_path):
    with MemoryDashboard(tmp_path, hparams={"model": "stack"}) as dashboard:
        train(dashboard, stack(2), 2)
    hparams, steps = read_recording(tmp_path / FILE)
    assert hparams["model"] == "stack"
    board = Board(tmp_path)
    assert [gathered.step for gathered in steps] == [1, 2]
    for gathered in steps:
        (sample,) = gathered.samples
        assert board.line("rank_0", "rebuilt_gib")[gathered.step] == pytest.approx(sample.rebuilt_bytes / GIB)
        assert board.line("rank_0", "replay_ms")[gathered.step] == pytest.approx(1e3 * sample.replay_seconds)


def test_a_recording_of_another_version_is_refused(tmp_path):
    path = tmp_path / FILE
    path.write_text(json.dumps({"version": 99, "hparams": {}}) + "\n")
    with pytest.raises(ValueError, match=r"version 99, this one reads version 1\.\nTo fix: "):
        read_recording(path)


def test_arguments_that_make_no_sense_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expects every to be at least 1, got 0"):
        MemoryDashboard(tmp_path, every=0)
    dashboard = MemoryDashboard(tmp_path)
    dashboard.close()
    dashboard.close()
    with pytest.raises(RuntimeError, match="after close"):
        dashboard.step()


def test_a_job_without_checkpoints_still_shows_its_process(tmp_path):
    with MemoryDashboard(tmp_path) as dashboard:
        torch.ones(3, requires_grad=True).sum().backward()
        dashboard.step()
    board = Board(tmp_path)
    assert board.line("rank_0", "kept_gib") == {1: 0}
    assert board.line("rank_0", "resident_gib")[1] > 0
