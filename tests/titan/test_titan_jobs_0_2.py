"""torchtitan 0.2 on two ranks: `mode = none` and `mode = remat` give the same digits."""

from pathlib import Path

import pytest
from titan_hosts import needs_0_2
from titan_jobs import STEPS, jobs, remat  # noqa: F401  (jobs is a fixture)

pytestmark = needs_0_2

BLOCKS = 6
NONE = ("--activation_checkpoint.mode", "none")
SAVE = ("attention.wo", "feed_forward.*")
TENSOR_PARALLEL = ("--parallelism.tensor_parallel_degree", "2")
HOST = (str(Path(__file__).parent / "host_trainer.py"),)


@pytest.fixture(scope="module")
def plain(jobs):  # noqa: F811
    """The job without checkpointing, under FSDP2."""
    return jobs.run(*NONE)


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        '[job]\ncustom_config_module = "torch_remat_titan.job_config"\n'
        '[activation_checkpoint]\nmode = "remat"\nsave_regions = ["attention.wo", "feed_forward.*"]\n'
        'layer_overrides = ["layers.5=off"]\n'
    )
    return ("--job.config_file", str(path))


def test_fsdp2_with_flags(jobs, plain):  # noqa: F811
    job = jobs.run(*remat(*SAVE))
    assert job.figures == plain.figures
    assert (job.last("forwards"), job.last("replays")) == ([BLOCKS] * 2, [BLOCKS] * 2)
    # what FSDP2 gathers and reduces is none of the replay's
    assert job.collectives("replay") == [{}, {}]
    assert job.collectives("forward") == plain.collectives("forward")
    assert job.collectives("backward") == plain.collectives("backward")


def test_toml_with_our_launcher(jobs, plain, toml):  # noqa: F811
    job = jobs.run(*toml)
    assert job.figures == plain.figures
    assert job.last("replays") == [BLOCKS - 1] * 2


@pytest.mark.job
def test_toml_with_the_hosts_launcher(jobs, plain, toml):  # noqa: F811
    job = jobs.run(*toml, launcher=HOST)
    assert job.figures == plain.figures
    assert job.log.count("layers.5: no checkpoint") == 2


@pytest.mark.job
def test_the_hosts_own_modes_are_untouched(jobs, plain):  # noqa: F811
    job = jobs.run("--activation_checkpoint.mode", "full")
    assert job.figures == plain.figures
    assert (job.last("forwards"), job.last("replays")) == ([0, 0], [0, 0])
    assert "Applied full activation checkpointing to the model" in job.log


@pytest.fixture(scope="module")
def plain_tensor_parallel(jobs):  # noqa: F811
    """The job without checkpointing, with sequence parallel blocks."""
    return jobs.run(*TENSOR_PARALLEL, *NONE)


@pytest.mark.job
def test_tensor_parallel_saves_what_the_preset_says(jobs, plain_tensor_parallel):  # noqa: F811
    job = jobs.run(*TENSOR_PARALLEL, *remat(preset="communication"))
    assert job.figures == plain_tensor_parallel.figures
    assert job.collectives("replay") == [{}, {}]
    assert job.collectives("forward") == plain_tensor_parallel.collectives("forward")


@pytest.mark.job
def test_tensor_parallel_replays_the_collectives_of_what_is_not_saved(jobs, plain_tensor_parallel):  # noqa: F811
    job = jobs.run(*TENSOR_PARALLEL, *remat(preset="none"))
    assert job.figures == plain_tensor_parallel.figures
    # Two gathers, before attention and feed-forward, and the reduction behind attention; the last one nobody needs.
    assert job.collectives("replay") == [{"all_gather": 2 * BLOCKS, "reduce_scatter": BLOCKS}] * 2


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble"])
@pytest.mark.job
def test_pipeline_replays_once_per_block_and_microbatch(jobs, schedule):  # noqa: F811
    parallel = ("--parallelism.pipeline_parallel_degree=2", f"--parallelism.pipeline_parallel_schedule={schedule}")
    expected = jobs.run(*parallel, *NONE)
    job = jobs.run(*parallel, *remat(*SAVE))
    assert job.figures == expected.figures
    assert job.last("replays") == job.last("forwards")
    assert sum(job.last("forwards")) == BLOCKS * 4


@pytest.mark.job
def test_expert_parallel(jobs):  # noqa: F811
    parallel = ("--model.name=deepseek_v3", "--parallelism.expert_parallel_degree=2")
    expected = jobs.run(*parallel, *NONE)
    job = jobs.run(*parallel, *remat("attention.wo", "moe.experts"))
    assert job.figures == expected.figures
    assert "all_to_all" in job.collectives("forward")[0]
    assert job.collectives("replay") == [{}, {}]


@pytest.mark.job
def test_a_checkpoint_of_one_mode_loads_under_the_other(jobs, plain, tmp_path):  # noqa: F811
    saving = ("--checkpoint.enable", f"--checkpoint.folder={tmp_path}", "--checkpoint.interval=2")
    first = jobs.run(*saving, *remat(*SAVE))
    assert first.figures == plain.figures
    # The state of step 2 goes on without checkpointing: the digits of step 3 are those of an undisturbed run.
    again = jobs.run(*saving, "--checkpoint.load_step=2", *NONE, fails=True)
    assert [rank[-1] for rank in again.figures] == [rank[-1] for rank in plain.figures]
    assert [[row["step"] for row in rows] for rows in again.rows] == [[STEPS]] * 2


@pytest.mark.job
def test_a_typo_stops_the_job_and_names_the_nearest(jobs):  # noqa: F811
    job = jobs.run("--parallelism.pipeline_parallel_degree=2", *remat("attention.w0"), fails=True)
    assert job.status != 0
    assert "save pattern 'attention.w0' matches no submodule of any block." in job.log
    assert "'attention.wo'" in job.log


@pytest.mark.job
def test_the_listing_of_regions_ends_the_job(jobs):  # noqa: F811
    job = jobs.run(*remat(list_regions=True), fails=True)
    assert "layers.0, layers.1 ... layers.5 (6 blocks):\n  attention\n  attention.wq\n" in job.log
    assert (job.rows, job.status) == ([], 0)
