"""Several ranks, one run: every rank has its lines, the worst has a name, and a rank that dies takes no step along."""

import boards_on_ranks
import pytest
from boards import GIB, INPUT, WIDE, Board, event_files
from helpers.ranks import free_port, run_ranks, values
from test_dashboard_failures import finish, start, steps_in

from torch_remat_tensorboard.recording import FILE, read_recording

pytestmark = pytest.mark.slow


def test_each_rank_has_the_lines_that_its_own_reports_say(tmp_path):
    reports = values(run_ranks(boards_on_ranks.train, 2, tmp_path, (1, 3)))
    board = Board(tmp_path)
    for rank in (0, 1):
        assert reports[rank] == [(INPUT + WIDE) * (1, 3)[rank]] * 3
        assert list(board.bytes(f"rank_{rank}", "kept_gib").values()) == reports[rank]
        assert board.line(f"rank_{rank}", "replays") == dict.fromkeys((1, 2, 3), (1, 3)[rank])
    assert board.bytes("all_ranks", "kept_gib/mean") == dict.fromkeys((1, 2, 3), sum(one[0] for one in reports) // 2)
    assert board.line("all_ranks", "worst_rank") == {1: 1, 2: 1, 3: 1}
    assert board.texts[2].startswith("**Step 2: rank 1 is the worst of 2**")
    assert len(event_files(tmp_path)) == 1


def test_an_uneven_pipeline_shows_its_first_rank_as_worst(tmp_path):
    values(run_ranks(boards_on_ranks.pipeline, 2, tmp_path))
    board = Board(tmp_path)
    assert board.line("all_ranks", "worst_rank") == {1: 0, 2: 0}
    # Two microbatches in flight in two blocks; the first block's inputs are views of one tensor with all microbatches.
    first = 6 * INPUT + 2 * INPUT + 4 * WIDE
    # One in flight; what the stage has received is a leaf that requires a gradient, and the pipeline's own.
    last = INPUT + 2 * WIDE
    assert board.bytes("rank_0", "kept_gib") == {1: first, 2: first}
    assert board.bytes("rank_1", "kept_gib") == {1: last, 2: last}
    assert board.line("stage_0", "stage/kept_gib") == board.line("rank_0", "kept_gib")
    assert board.line("stage_1", "stage/kept_gib") == board.line("rank_1", "kept_gib")
    assert board.line("rank_0", "replays") == {1: 12, 2: 12}
    assert board.texts[1].startswith("**Step 1: rank 0 (stage 0) is the worst of 2**")


def test_any_rank_can_write(tmp_path):
    folder = tmp_path / "run"
    outcomes = values(run_ranks(boards_on_ranks.other_writer, 2, folder))
    assert [writes for _, writes in outcomes] == [False, True]
    assert steps_in(folder) == {1}


def test_what_arrives_late_is_written_one_step_later_and_at_the_end(tmp_path):
    (tmp_path / "run").mkdir()
    assert values(run_ranks(boards_on_ranks.late, 2, tmp_path / "run"))[0] == [False, True, True]
    assert steps_in(tmp_path / "run") == {1, 2, 3}
    _, steps = read_recording(tmp_path / "run" / FILE)
    assert [len(gathered.samples) for gathered in steps] == [2, 2, 2]


def test_a_killed_rank_leaves_every_step_before(tmp_path):
    port = free_port()
    code = (
        "import os\n"
        f"os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='{port}', WORLD_SIZE='2', RANK=sys.argv[2])\n"
        "import boards_on_ranks\nboards_on_ranks.killed(sys.argv[1])"
    )
    other = start(code, tmp_path, 1)
    try:
        status, errors = finish(code, tmp_path, 0)
        assert other.wait(30) == -9
    finally:
        other.kill()
        other.wait()
    assert status != 0
    assert "torch_remat_tensorboard" not in errors.partition("Traceback")[0]
    assert steps_in(tmp_path) == {1, 2, 3}
    assert Board(tmp_path).line("rank_1", "kept_gib")[3] * GIB == 2 * (INPUT + WIDE)
