"""Show a recorded run in TensorBoard, without training: the same charts, redrawn from the samples of every rank.

    python scripts/replay_dashboard.py                                    the recorded pipeline job beside this script
    python scripts/replay_dashboard.py runs/llama/samples.jsonl OUTPUT    the recording of a run of your own
    python scripts/replay_dashboard.py --seconds-per-step 1               as if it were training now

Every run of `MemoryDashboard` has a recording, `samples.jsonl`, in its folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "integrations")]

from torch_remat_tensorboard.recording import FILE, read_recording  # noqa: E402
from torch_remat_tensorboard.writer import RunWriter  # noqa: E402

RECORDED = PROJECT / "scripts" / "dashboard_run.jsonl"


def main() -> int:
    """Write the run and print how to look at it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recording", type=Path, nargs="?", default=RECORDED, help=f"a {FILE}; default {RECORDED.name}")
    parser.add_argument(
        "output", type=Path, nargs="?", default=PROJECT / ".cache" / "replayed", help="folder of the run"
    )
    parser.add_argument("--image-every", type=int, default=10, help="steps from one picture to the next (default 10)")
    parser.add_argument("--seconds-per-step", type=float, help="write a step every so many seconds, as of now")
    options = parser.parse_args()
    if not options.recording.is_file():
        parser.error(f"{options.recording} is no file. To fix: name the {FILE} of a run")
    if options.output.is_dir() and any(options.output.iterdir()):
        parser.error(f"{options.output} has files already. To fix: remove it, or name another folder")
    hparams, steps = read_recording(options.recording)
    if options.seconds_per_step:
        print(f"open it now: tensorboard --logdir {options.output}", flush=True)
    writer = RunWriter(options.output, options.image_every)
    for gathered in steps:
        if options.seconds_per_step:
            time.sleep(options.seconds_per_step)
            gathered = replace(gathered, time=time.time())
        writer.write(gathered, hparams)
    writer.close()
    print(f"{len(steps)} steps. To look at them: tensorboard --logdir {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
