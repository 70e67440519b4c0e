"""Real jobs on two CPU ranks: torchtitan's debug models on English text, with the flags that a user would type."""

import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from titan_hosts import SERIES, environment

from torch_remat_titan.text import TextAssets, prepare_text

STEPS = 3
SDPA = "--override.imports=torch_remat_titan.attention.sdpa_attention"


@dataclass(frozen=True)
class Job:
    """What a job left: the rows of each rank, and what it wrote to the terminal."""

    rows: list[list[dict]]
    log: str
    status: int

    @property
    def figures(self):
        """Loss and gradient norm of each step and rank, with all digits."""
        return [[(row["step"], repr(row["loss"]), repr(row["grad_norm"])) for row in rows] for rows in self.rows]

    def last(self, name):
        """A count of the last step, for each rank."""
        return [rows[-1][name] for rows in self.rows]

    def collectives(self, phase):
        """Collectives of the last step in `phase`, for each rank."""
        return [rows[-1]["collectives"][phase] for rows in self.rows]


class Jobs:
    """Runs jobs in folders of its own."""

    def __init__(self, folder: Path, text: TextAssets):
        self._folder, self._text, self._count = folder, text, 0

    def run(self, *arguments, launcher=("-m", "torch_remat_titan.train"), ranks=2, fails=False, **more):
        """Run the debug model with further `arguments`; the job must finish all its steps."""
        self._count += 1
        home = self._folder / f"job{self._count}"
        home.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        rows = home / "rows"
        # The family trainer brings attention of its own.
        attention = () if SERIES == "0.2" or "family_trainer" in launcher[-1] else (SDPA,)
        variables = environment(**{"TORCH_REMAT_ROWS": str(rows), "TORCH_REMAT_ROWS_COLLECTIVES": "1", **more})
        with (home / "log").open("w+") as log:
            done = subprocess.run(
                [*command, *launcher, *self.common(home), *attention, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=home,
                timeout=280,
                env=variables,
            )
        text = (home / "log").read_text(errors="replace")
        found = [
            [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(rows.glob("rank*.jsonl"))
        ]
        if not fails:
            # The teardown of gloo may end a finished process with a signal: what counts is that all steps are there.
            assert [len(one) for one in found] == [STEPS] * ranks, text[-6000:]
            assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for one in found for row in one)
        return Job(found, text, done.returncode)

    def common(self, home: Path) -> list[str]:
        """What all jobs have in common."""
        if SERIES == "0.2":
            return [
                *("--model.name=llama3", "--model.flavor=debugmodel", f"--model.hf_assets_path={self._text.tokenizer}"),
                *("--training.dataset=c4_test", f"--training.dataset_path={self._text.dataset}"),
                *(f"--training.steps={STEPS}", "--training.local_batch_size=4", "--training.seq_len=64"),
                *("--training.mixed_precision_param=float32", "--metrics.log_freq=1", f"--job.dump_folder={home}"),
                *("--debug.seed=7", "--debug.deterministic"),
            ]
        return [
            *("--module=llama3", "--config=llama3_debugmodel", f"--hf-assets-path={self._text.tokenizer}"),
            f"--dataloader.dataset-path={self._text.dataset}",
            *(f"--training.steps={STEPS}", "--training.local-batch-size=4", "--training.seq-len=64"),
            *("--training.mixed-precision-param=float32", "--training.disable-cuda-graphs", f"--dump-folder={home}"),
            *("--debug.seed=7", "--debug.deterministic"),
        ]


FAMILIES = {
    "0.2": {
        "deepseek_v3": ["--model.name=deepseek_v3"],
        "llama4": ["--model.name=llama4"],
        "qwen3": ["--model.name=qwen3"],
        "qwen3_moe": ["--model.name=qwen3", "--model.flavor=debugmodel_moe"],
        "gpt_oss": ["--model.name=gpt_oss"],
    },
    "0.3": {
        "deepseek_v3": ["--module=deepseek_v3", "--config=deepseek_v3_debugmodel"],
        "deepseek_v3_mtp": ["--module=deepseek_v3", "--config=deepseek_v3_debugmodel_mtp"],
        "qwen3": ["--module=qwen3", "--config=qwen3_debugmodel"],
        "qwen3_moe": ["--module=qwen3", "--config=qwen3_moe_debug"],
        "gpt_oss": ["--module=gpt_oss", "--config=gpt_oss_debugmodel_flex"],
        "kimi_k2_7": ["--module=titan_configs", "--config=kimi_on_text"],
        "muse_glimmer": ["--module=muse_glimmer", "--config=muse_glimmer_debugmodel"],
    },
}
"""The flags that choose the debug model of a family."""


def family(name: str) -> list[str]:
    """The flags that choose the debug model of a family of the installed torchtitan."""
    return FAMILIES[SERIES or "0.3"][name]


def mode(name: str) -> tuple[str, ...]:
    """The flags of one of the host's own modes."""
    return ("--activation_checkpoint.mode", name) if SERIES == "0.2" else (f"activation-checkpoint:{name}",)


@pytest.fixture(scope="session")
def jobs(tmp_path_factory):
    """Jobs of this test session; the text is made once."""
    folder = tmp_path_factory.mktemp("titan-jobs")
    return Jobs(folder, prepare_text(folder / "text"))


def remat(*save, **options):
    """The flags of our mode, as a user types them."""
    flags = ["--activation_checkpoint.mode", "remat"]
    if save:
        flags += ["--activation_checkpoint.save_regions", ",".join(save)]
    for name, value in options.items():
        flags += (
            [f"--activation_checkpoint.{name}", value] if value is not True else [f"--activation_checkpoint.{name}"]
        )
    return flags
