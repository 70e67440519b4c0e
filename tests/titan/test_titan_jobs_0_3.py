"""torchtitan 0.3 on two ranks: no activation checkpointing and ours give the same digits."""

from pathlib import Path

import pytest
from titan_hosts import needs_0_3
from titan_jobs import STEPS, jobs, remat  # noqa: F401  (jobs is a fixture)

pytestmark = needs_0_3

BLOCKS = 6
NONE = ("activation-checkpoint:none",)
SAVE = ("attention.wo", "feed_forward.*")
TENSOR_PARALLEL = ("--parallelism.tensor-parallel-degree", "2")
HOST = (str(Path(__file__).parent / "host_trainer.py"),)


@pytest.fixture(scope="module")
def plain(jobs):  # noqa: F811
    """The job without checkpointing, under FSDP2."""
    return jobs.run(*NONE)


def test_fsdp2_with_flags(jobs, plain):  # noqa: F811
    job = jobs.run(*remat(*SAVE))
    assert job.figures == plain.figures
    assert (job.last("forwards"), job.last("replays")) == ([BLOCKS] * 2, [BLOCKS] * 2)
    assert job.collectives("replay") == [{}, {}]
    assert job.collectives("forward") == plain.collectives("forward")
    assert job.collectives("backward") == plain.collectives("backward")


@pytest.mark.job
def test_the_subcommand(jobs, plain):  # noqa: F811
    job = jobs.run("activation-checkpoint:remat", "--activation-checkpoint.save-regions", "attention.wo,feed_forward.*")
    assert job.figures == plain.figures
    assert job.last("replays") == [BLOCKS] * 2


@pytest.mark.job
def test_a_config_function_with_the_hosts_launcher(jobs, plain):  # noqa: F811
    recipe = ("--module=torch_remat_titan.recipes", "--config=llama3_debugmodel_remat")
    job = jobs.run(*recipe, launcher=HOST)
    assert job.figures == plain.figures
    assert job.log.count("save attention.wo, attention.inner_attention, feed_forward.w1") == 2


@pytest.mark.job
def test_the_hosts_own_choices_are_untouched(jobs, plain):  # noqa: F811
    job = jobs.run("activation-checkpoint:full")
    assert job.figures == plain.figures
    assert (job.last("forwards"), job.last("replays")) == ([0, 0], [0, 0])
    assert "Applied FullAC activation checkpointing to the model" in job.log


@pytest.fixture(scope="module")
def plain_tensor_parallel(jobs):  # noqa: F811
    """The job without checkpointing, with sequence parallel blocks."""
    return jobs.run(*TENSOR_PARALLEL, *NONE)


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
    parallel = ("--parallelism.pipeline-parallel-degree=2", f"--parallelism.pipeline-parallel-schedule={schedule}")
    expected = jobs.run(*parallel, *NONE)
    job = jobs.run(*parallel, *remat(*SAVE))
    assert job.figures == expected.figures
    assert job.last("replays") == job.last("forwards")
    assert sum(job.last("forwards")) == BLOCKS * 4


def test_expert_parallel(jobs):  # noqa: F811
    # partial_dtensor: the default back end exchanges tokens by lists of uneven tensors, which gloo does not take.
    parallel = (
        *("--module=deepseek_v3", "--config=deepseek_v3_debugmodel", "--parallelism.expert-parallel-degree=2"),
        "--parallelism.spmd-backend=partial_dtensor",
    )
    expected = jobs.run(*parallel, *NONE)
    job = jobs.run(*parallel, *remat("attention.wo", "moe.routed_experts"))
    assert job.figures == expected.figures
    assert "all_to_all" in job.collectives("forward")[0]
    assert job.collectives("replay") == [{}, {}]


@pytest.mark.job
def test_a_checkpoint_of_one_choice_loads_under_another(jobs, plain, tmp_path):  # noqa: F811
    saving = ("--checkpoint.enable", f"--checkpoint.folder={tmp_path}", "--checkpoint.interval=2")
    first = jobs.run(*saving, *remat(*SAVE))
    assert first.figures == plain.figures
    again = jobs.run(*saving, "--checkpoint.load-step=2", *NONE, fails=True)
    assert [rank[-1] for rank in again.figures] == [rank[-1] for rank in plain.figures]
    assert [[row["step"] for row in rows] for rows in again.rows] == [[STEPS]] * 2


@pytest.mark.job
def test_a_typo_stops_the_job_and_names_the_nearest(jobs):  # noqa: F811
    job = jobs.run("--parallelism.pipeline-parallel-degree=2", *remat("attention.w0"), fails=True)
    assert job.status != 0
    assert "save pattern 'attention.w0' matches no submodule of any block." in job.log
    assert "'attention.wo'" in job.log


@pytest.mark.job
def test_the_listing_of_regions_ends_the_job(jobs):  # noqa: F811
    job = jobs.run(*remat(list_regions=True), fails=True)
    assert "layers.0, layers.1 ... layers.5 (6 blocks):\n  attention\n  attention.rope\n" in job.log
    assert (job.rows, job.status) == ([], 0)
