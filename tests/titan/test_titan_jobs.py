"""torchtitan on several ranks: jobs without activation checkpointing and with ours give the same digits."""

from pathlib import Path

import pytest
from titan_configs import STAGES
from titan_hosts import SERIES, environment, needs_0_2, needs_0_3, needs_any
from titan_jobs import FAMILIES, STEPS, family, jobs, mode, remat  # noqa: F401  (jobs is a fixture)

pytestmark = needs_any

BLOCKS = 6
SAVE = ("attention.wo", "feed_forward.*")
TENSOR_PARALLEL = ("--parallelism.tensor_parallel_degree=2",)
HOST = (str(Path(__file__).parent / "host_trainer.py"),)
PLAIN_ATTENTION = (str(Path(__file__).parent / "family_trainer.py"),)
only_titan_jobs_on_0_2 = pytest.mark.job if SERIES == "0.2" else pytest.mark.slow


def pipeline(schedule):
    return ("--parallelism.pipeline_parallel_degree=2", f"--parallelism.pipeline_parallel_schedule={schedule}")


@pytest.fixture(scope="module")
def plain(jobs):  # noqa: F811
    """The job without checkpointing, under FSDP2."""
    return jobs.run(*mode("none"))


def test_fsdp2_with_flags(jobs, plain):  # noqa: F811
    job = jobs.run(*remat(*SAVE))
    assert job.figures == plain.figures
    assert (job.last("forwards"), job.last("replays")) == ([BLOCKS] * 2, [BLOCKS] * 2)
    # what FSDP2 gathers and reduces is none of the replay's
    assert job.collectives("replay") == [{}, {}]
    assert job.collectives("forward") == plain.collectives("forward")
    assert job.collectives("backward") == plain.collectives("backward")


# --- Ways to ask for it


@pytest.fixture
def toml(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        '[job]\ncustom_config_module = "torch_remat_titan.job_config"\n'
        '[activation_checkpoint]\nmode = "remat"\nsave_regions = ["attention.wo", "feed_forward.*"]\n'
        'layer_overrides = ["layers.5=off"]\n'
    )
    return ("--job.config_file", str(path))


@needs_0_2
def test_toml_with_our_launcher(jobs, plain, toml):  # noqa: F811
    job = jobs.run(*toml)
    assert job.figures == plain.figures
    assert job.last("replays") == [BLOCKS - 1] * 2


@needs_0_2
@pytest.mark.job
def test_toml_with_the_hosts_launcher(jobs, plain, toml):  # noqa: F811
    job = jobs.run(*toml, launcher=HOST)
    assert job.figures == plain.figures
    assert job.log.count("layers.5: no checkpoint") == 2


OWN_CONFIG = """from dataclasses import dataclass, field
from torch_remat_titan.job_config import ActivationCheckpoint

@dataclass
class Mine:
    knob: int = 1

@dataclass
class JobConfig:
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    mine: Mine = field(default_factory=Mine)
"""


@needs_0_2
@pytest.mark.job
def test_a_config_module_of_the_jobs_own_with_custom_import(jobs, plain, toml, tmp_path):  # noqa: F811
    (tmp_path / "own_job_config.py").write_text(OWN_CONFIG)
    text = Path(toml[1]).read_text().replace("torch_remat_titan.job_config", "own_job_config")
    own = '[mine]\nknob = 3\n[experimental]\ncustom_import = "torch_remat_titan.job_config"\n'
    Path(toml[1]).write_text(text + own)
    variables = environment()
    variables["PYTHONPATH"] += f":{tmp_path}"
    job = jobs.run(*toml, launcher=HOST, PYTHONPATH=variables["PYTHONPATH"])
    assert job.figures == plain.figures
    assert job.log.count("layers.5: no checkpoint") == 2


@needs_0_2
@pytest.mark.job
def test_custom_import_without_our_section_says_what_is_missing(jobs, tmp_path):  # noqa: F811
    path = tmp_path / "job.toml"
    path.write_text(
        '[experimental]\ncustom_import = "torch_remat_titan.job_config"\n[activation_checkpoint]\nmode = "remat"\n'
    )
    job = jobs.run("--job.config_file", str(path), launcher=HOST, fails=True)
    assert job.status != 0
    assert 'To fix: [job] custom_config_module = "torch_remat_titan.job_config"' in job.log


@needs_0_3
@pytest.mark.job
def test_the_subcommand(jobs, plain):  # noqa: F811
    job = jobs.run("activation-checkpoint:remat", "--activation-checkpoint.save-regions", "attention.wo,feed_forward.*")
    assert job.figures == plain.figures
    assert job.last("replays") == [BLOCKS] * 2


@needs_0_3
@pytest.mark.job
def test_a_config_function_with_the_hosts_launcher(jobs, plain):  # noqa: F811
    recipe = ("--module=torch_remat_titan.recipes", "--config=llama3_debugmodel_remat")
    job = jobs.run(*recipe, launcher=HOST)
    assert job.figures == plain.figures
    assert job.log.count("save attention.wo, attention.inner_attention, feed_forward.w1") == 2


@pytest.mark.job
def test_the_hosts_own_modes_are_untouched(jobs, plain):  # noqa: F811
    job = jobs.run(*mode("full"))
    assert job.figures == plain.figures
    assert (job.last("forwards"), job.last("replays")) == ([0, 0], [0, 0])
    name = "full" if SERIES == "0.2" else "FullAC"
    assert f"Applied {name} activation checkpointing to the model" in job.log


@pytest.mark.job
def test_a_typo_stops_the_job_and_names_the_nearest(jobs):  # noqa: F811
    job = jobs.run("--parallelism.pipeline_parallel_degree=2", *remat("attention.w0"), fails=True)
    assert job.status != 0
    assert "save pattern 'attention.w0' matches no submodule of any block." in job.log
    assert "'attention.wo'" in job.log
    assert "Applied activation checkpointing" not in job.log, "found on the whole model, before the first stage"


@pytest.mark.job
def test_the_listing_of_regions_ends_the_job(jobs):  # noqa: F811
    job = jobs.run(*remat(list_regions=True), fails=True)
    second = "attention.wq" if SERIES == "0.2" else "attention.rope"
    assert f"layers.0, layers.1 ... layers.5 (6 blocks):\n  attention\n  {second}\n" in job.log
    assert (job.rows, job.status) == ([], 0)


@pytest.mark.job
def test_a_checkpoint_of_one_mode_loads_under_the_other(jobs, plain, tmp_path):  # noqa: F811
    saving = ("--checkpoint.enable", "--checkpoint.interval=2")
    ours, theirs = (f"--checkpoint.folder={tmp_path / name}" for name in ("ours", "theirs"))
    assert jobs.run(*saving, ours, *remat(*SAVE)).figures == plain.figures
    assert jobs.run(*saving, theirs, *mode("none")).figures == plain.figures
    # The state of step 2 goes on under the other mode: the digits of step 3 are those of an undisturbed run.
    for folder, other in ((ours, mode("none")), (theirs, remat(*SAVE))):
        again = jobs.run(*saving, folder, "--checkpoint.load_step=2", *other, fails=True)
        assert [rank[-1] for rank in again.figures] == [rank[-1] for rank in plain.figures]
        assert [[row["step"] for row in rows] for rows in again.rows] == [[STEPS]] * 2


# --- Parallelisms


@pytest.fixture(scope="module")
def plain_tensor_parallel(jobs):  # noqa: F811
    """The job without checkpointing, with sequence parallel blocks."""
    return jobs.run(*TENSOR_PARALLEL, *mode("none"))


@only_titan_jobs_on_0_2
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


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble"])
@pytest.mark.job
def test_pipeline_replays_once_per_block_and_microbatch(jobs, schedule):  # noqa: F811
    expected = jobs.run(*pipeline(schedule), *mode("none"))
    job = jobs.run(*pipeline(schedule), *remat(*SAVE))
    assert job.figures == expected.figures
    assert job.last("replays") == job.last("forwards")
    assert sum(job.last("forwards")) == BLOCKS * 4


@pytest.mark.job
def test_a_pipeline_stage_without_blocks(jobs, tmp_path):  # noqa: F811
    if SERIES == "0.2":
        path = tmp_path / "stages.toml"
        path.write_text(f"[parallelism]\nmodule_fqns_per_model_part = {[STAGES[0], [*STAGES[1], 'output']]}\n")
        stages = (*pipeline("1F1B"), "--job.config_file", str(path))
    else:
        stages = (*pipeline("1F1B"), "--module=titan_configs", "--config=llama3_with_a_stage_without_blocks")
    expected = jobs.run(*stages, *mode("none"))
    job = jobs.run(*stages, *remat(*SAVE, layer_overrides="layers.5=off"))
    assert job.figures == expected.figures
    assert job.last("replays") == job.last("forwards") == [0, (BLOCKS - 1) * 4]


@only_titan_jobs_on_0_2
def test_expert_parallel(jobs):  # noqa: F811
    # partial_dtensor: the default back end of 0.3 exchanges lists of uneven tensors, which gloo does not take
    parallel = (*family("deepseek_v3"), "--parallelism.expert_parallel_degree=2")
    experts = "moe.experts" if SERIES == "0.2" else "moe.routed_experts"
    parallel += () if SERIES == "0.2" else ("--parallelism.spmd_backend=partial_dtensor",)
    expected = jobs.run(*parallel, *mode("none"))
    job = jobs.run(*parallel, *remat("attention.wo", experts))
    assert job.figures == expected.figures
    assert "all_to_all" in job.collectives("forward")[0]
    assert job.collectives("replay") == [{}, {}]


@pytest.mark.job
def test_context_parallel(jobs):  # noqa: F811
    """By FlexAttention, which is plain operations here: torch has no sharding rule for the CPU kernel of SDPA."""
    # The host compiles what makes the masks: nothing may count collectives around that.
    options = {"launcher": PLAIN_ATTENTION, "TORCH_REMAT_ROWS_COLLECTIVES": ""}
    parallel = ("--parallelism.context_parallel_degree=2", "--training.seq_len=512", "--training.local_batch_size=1")
    parallel += ("--model.flavor=debugmodel_flex_attn",) if SERIES == "0.2" else ()
    expected = jobs.run(*parallel, *mode("none"), **options)
    job = jobs.run(*parallel, *remat(preset="communication"), **options)
    assert job.figures == expected.figures
    assert job.last("replays") == job.last("forwards") == [BLOCKS] * 2
    assert "(6 blocks): save attention.inner_attention\n" in job.log, "what has the collectives of this job inside"


TWO_AT_ONCE = {
    "FSDP2 x TP": (*TENSOR_PARALLEL, "--parallelism.data_parallel_shard_degree=2"),
    "FSDP2 x PP": (*pipeline("InterleavedZeroBubble"), "--parallelism.data_parallel_shard_degree=2"),
    "TP x PP": (*TENSOR_PARALLEL, *pipeline("InterleavedZeroBubble")),
}


@pytest.mark.parametrize("parallel", TWO_AT_ONCE)
@pytest.mark.job
def test_two_parallelisms_at_once(jobs, parallel):  # noqa: F811
    expected = jobs.run(*TWO_AT_ONCE[parallel], *mode("none"), ranks=4)
    job = jobs.run(*TWO_AT_ONCE[parallel], *remat(preset="communication", save_regions=",".join(SAVE)), ranks=4)
    assert job.figures == expected.figures
    assert job.last("replays") == job.last("forwards")
    assert sum(job.last("forwards")) == BLOCKS * (4 if parallel == "FSDP2 x TP" else 4 * 2)
    # every tensor-parallel collective is in what is saved, and FSDP2's are none of the replay's
    assert job.collectives("replay") == [{}] * 4
    for phase in ("forward", "backward"):
        assert job.collectives(phase) == expected.collectives(phase)


@pytest.mark.parametrize("name", [name for name in FAMILIES.get(SERIES or "", {}) if name != "deepseek_v3"])
@pytest.mark.job
def test_another_family(jobs, name):  # noqa: F811
    options = {"launcher": PLAIN_ATTENTION, "ranks": 1}
    sizes = ("--training.seq_len=32", "--training.local_batch_size=1")
    if name == "gpt_oss":
        # Its blocks compute in bfloat16 alone, which is a matter of FSDP2, and slow on most CPUs.
        sizes = ("--training.seq_len=16", "--training.local_batch_size=1", "--training.mixed_precision_param=bfloat16")
        options["ranks"] = 2
    expected = jobs.run(*family(name), *sizes, *mode("none"), **options)
    job = jobs.run(*family(name), *sizes, *remat(preset="matmuls", determinism_check="bitwise"), **options)
    assert job.figures == expected.figures
    assert job.last("replays") == job.last("forwards")
    assert min(job.last("forwards")) >= 4


# --- Model compilation

COMPILED = ("--compile.enable", "--compile.backend=aot_eager")
UNCOUNTED = {"TORCH_REMAT_ROWS_COLLECTIVES": ""}
"""Nothing compiles under the counter of collectives."""


@pytest.mark.parametrize("preset", ["none", "matmuls"])
@pytest.mark.job
def test_compiled_blocks(jobs, preset):  # noqa: F811
    expected = jobs.run(*COMPILED, *mode("none"), **UNCOUNTED)
    job = jobs.run(*COMPILED, *remat(preset=preset), **UNCOUNTED)
    assert job.figures == expected.figures
    assert "Compiling each TransformerBlock with torch.compile" in job.log
    assert job.last("forwards") == [0, 0], "the blocks' checkpoints are in graphs"


@pytest.mark.job
def test_compiled_blocks_of_pipeline_stages(jobs):  # noqa: F811
    expected = jobs.run(*COMPILED, *pipeline("1F1B"), *mode("none"), **UNCOUNTED)
    job = jobs.run(*COMPILED, *pipeline("1F1B"), *remat(preset="matmuls"), **UNCOUNTED)
    assert job.figures == expected.figures
    assert job.last("forwards") == [0, 0]


@needs_0_3  # on 0.2 the backward of DTensors in the host's compiled blocks fails, with and without us
@pytest.mark.job
def test_compiled_blocks_with_tensor_parallel(jobs):  # noqa: F811
    expected = jobs.run(*COMPILED, *TENSOR_PARALLEL, *mode("none"), **UNCOUNTED)
    job = jobs.run(*COMPILED, *TENSOR_PARALLEL, *remat(preset="communication"), **UNCOUNTED)
    assert job.figures == expected.figures
    assert job.last("forwards") == [0, 0]


@pytest.mark.job
def test_compiled_experts(jobs):  # noqa: F811
    """On 0.2 the checkpoints of blocks with experts run eagerly, around compiled parts."""
    parallel = (*family("deepseek_v3"), "--parallelism.expert_parallel_degree=2", "--training.local_batch_size=2")
    parallel += () if SERIES == "0.2" else ("--parallelism.spmd_backend=partial_dtensor",)
    expected = jobs.run(*COMPILED, *parallel, *mode("none"), **UNCOUNTED)
    job = jobs.run(*COMPILED, *parallel, *remat(preset="matmuls"), **UNCOUNTED)
    assert job.figures == expected.figures
    assert job.last("replays") == job.last("forwards") == ([5, 5] if SERIES == "0.2" else [0, 0])
    assert "is recomputed: it is compiled" not in job.log


@pytest.mark.job
def test_what_compiled_blocks_cannot_keep_stops_the_job(jobs):  # noqa: F811
    job = jobs.run(*COMPILED, *remat(preset="none", determinism_check="bitwise"), fails=True, **UNCOUNTED)
    assert job.status != 0
    assert "To fix: leave determinism_check out, or check a short run without compile.enable." in job.log
