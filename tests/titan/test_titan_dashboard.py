"""`activation_checkpoint.memory_dashboard`: torchtitan jobs write a run with every rank's memory."""

from types import SimpleNamespace

import pytest
from titan_hosts import needs_any, python
from titan_jobs import STEPS, jobs, remat

from torch_remat_titan import memory_dashboard
from torch_remat_titan.options import RematOptions

pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

__all__ = ["jobs"]


def lines(folder, run):
    """Tag -> step -> value, by TensorBoard's own reader."""
    events = EventAccumulator(str(folder / run), size_guidance={"scalars": 0}).Reload()
    return {
        tag.removeprefix("remat/"): {one.step: one.value for one in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


class FakeTrainer:
    """What the wrapper asks of a host's trainer."""

    def __init__(self, folder, dashboard, series):
        section = SimpleNamespace(memory_dashboard=dashboard, save_regions=["attention.*", "wo"], preset="")
        if series == "0.2":
            self.job_config = SimpleNamespace(activation_checkpoint=section, job=SimpleNamespace(dump_folder=folder))
        else:
            self.config = SimpleNamespace(activation_checkpoint=section, dump_folder=folder)
        self.parallel_dims = SimpleNamespace(pp_enabled=False)
        self.metrics_processor = SimpleNamespace(log=lambda step: self.logged.append(step))
        self.logged = []
        self.step = 0

    def train_step(self, batches):
        self.metrics_processor.log(self.step)

    def train(self):
        while self.step < 3:
            self.step += 1
            self.train_step([])
        return "done"


@pytest.mark.parametrize("series", ["0.2", "0.3"])
def test_each_step_of_the_trainer_is_one_of_the_dashboard(tmp_path, series):
    trainer = FakeTrainer(tmp_path, "memory", series)
    assert memory_dashboard._watched(FakeTrainer.train)(trainer) == "done"
    assert trainer.logged == [1, 2, 3]
    assert set(lines(tmp_path / "memory", "rank_0")["step_ms"]) == {1, 2, 3}
    assert "train_step" not in vars(trainer)
    assert not hasattr(trainer.metrics_processor, "log")


def test_without_the_option_the_trainer_is_left_alone(tmp_path):
    trainer = FakeTrainer(tmp_path, "", "0.3")
    assert memory_dashboard._watched(FakeTrainer.train)(trainer) == "done"
    assert list(tmp_path.iterdir()) == []


def test_an_exception_of_the_trainer_passes_and_leaves_its_steps(tmp_path):
    class Fails(FakeTrainer):
        def train_step(self, batches):
            if self.step == 3:
                raise ZeroDivisionError
            super().train_step(batches)

    trainer = Fails(tmp_path, "memory", "0.3")
    with pytest.raises(ZeroDivisionError):
        memory_dashboard._watched(FakeTrainer.train)(trainer)
    assert set(lines(tmp_path / "memory", "rank_0")["step_ms"]) == {1, 2}


def test_the_options_that_say_something_are_the_hparams():
    options = RematOptions.of({"save_regions": "attention.*,wo", "memory_dashboard": "memory"})
    assert memory_dashboard._hparams(options) == {"save_regions": "attention.*, wo", "determinism_check": "default"}


def test_where_tensorboard_is_missing_the_option_is_refused():
    done = python(
        "import sys\nsys.modules['tensorboard'] = None\n"
        "from torch_remat_titan.memory_dashboard import watch_trainers\nwatch_trainers()"
    )
    assert "memory_dashboard needs TensorBoard, and it cannot be imported" in done.stderr
    assert 'To fix: pip install "torch_remat[tensorboard]", or leave the option empty.' in done.stderr


@needs_any
@pytest.mark.job
def test_a_job_of_two_ranks_shows_both(jobs, tmp_path):
    job = jobs.run(*remat("attention.wo", "feed_forward.*", memory_dashboard=str(tmp_path)))
    for rank in (0, 1):
        found = lines(tmp_path, f"rank_{rank}")
        assert set(found["kept_gib"]) == set(range(1, STEPS + 1))
        assert set(found["replays"].values()) == {job.last("replays")[rank]}
    assert {tag for tag in lines(tmp_path, "all_ranks") if "region_gib" in tag} >= {
        "region_gib/layers.*::attention.wo",
        "region_gib/layers.*::feed_forward.w1",
        "region_gib/layers.*::inputs",
    }


@needs_any
@pytest.mark.job
def test_the_first_stage_of_a_pipeline_is_worst(jobs, tmp_path):
    schedule = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=1F1B"]
    jobs.run(*remat("attention.wo", "feed_forward.*", memory_dashboard=str(tmp_path)), *schedule)
    assert set(lines(tmp_path, "all_ranks")["worst_rank"].values()) == {0}
    last = lines(tmp_path, "stage_1")["stage/kept_gib"]
    for step, kept in lines(tmp_path, "stage_0")["stage/kept_gib"].items():
        assert kept > 1.5 * last[step]
