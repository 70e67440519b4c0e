"""Take the pictures of docs/tensorboard.md: a TensorBoard server on loopback, and a real browser without a window.

    python scripts/dashboard_screenshots.py                  of the recorded run beside this script, into docs/images
    python scripts/dashboard_screenshots.py runs/llama DIR   of a run of your own, into a folder

Needs Chromium (Debian: `apt-get install chromium`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from PIL import Image

PROJECT = Path(__file__).resolve().parents[1]
IMAGES = PROJECT / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PAGES = {
    "tensorboard-ranks": ("custom_scalars&_smoothingWeight=0", (1400, 1060), 1),
    "tensorboard-regions": ("images", (900, 480), 2),
    "tensorboard-report": ("text", (1400, 720), 1),
}
"""Name of the file -> page of TensorBoard, size of the window, and how many pixels there are to one of its own."""


def main() -> int:
    """Take them all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("log_dir", type=Path, nargs="?", help="folder of a run; default: the recorded one, replayed")
    parser.add_argument("output", type=Path, nargs="?", default=IMAGES, help="folder of the pictures")
    options = parser.parse_args()
    if browser() is None:
        parser.error(f"none of {', '.join(BROWSERS)} is on the path. To fix: apt-get install chromium")
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        log_dir = options.log_dir or _replayed(Path(folder) / "pipeline")
        with tensorboard(log_dir) as address:
            for name, (page, size, scale) in PAGES.items():
                path = options.output / f"{name}.png"
                screenshot(f"{address}#{page}", path, size, scale)
                Image.open(path).convert("P", palette=Image.Palette.ADAPTIVE, colors=160).save(path, optimize=True)
                print(path)
    return 0


def browser() -> str | None:
    """The browser on the path, if there is one."""
    return next((found for name in BROWSERS if (found := shutil.which(name))), None)


@contextlib.contextmanager
def tensorboard(log_dir: Path) -> Iterator[str]:
    """A server for `log_dir` on loopback, at a port of its own choice; gives its address.

    Raises:
        RuntimeError: it has not come up within a minute.
    """
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", log_dir.name, "--host", "127.0.0.1", "--port", "0"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=log_dir.absolute().parent)
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            process.wait(30)


def screenshot(address: str, path: Path, size: tuple[int, int], scale: int = 1) -> None:
    """Open a page in a window of `size`, wait until it is drawn, and save what it shows.

    Raises:
        RuntimeError: there is no browser, or it took no picture.
    """
    program = browser()
    if program is None:
        raise RuntimeError(f"none of {', '.join(BROWSERS)} is on the path.\nTo fix: apt-get install chromium")
    with tempfile.TemporaryDirectory() as profile:
        command = [
            *(program, "--headless=new", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"),
            *(["--no-sandbox"] if os.geteuid() == 0 else []),  # root has none
            *(
                f"--window-size={size[0]},{size[1]}",
                f"--force-device-scale-factor={scale}",
                "--virtual-time-budget=20000",
                f"--screenshot={path.absolute()}",
                address,
            ),
        ]
        path.unlink(missing_ok=True)
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    if not path.exists():
        raise RuntimeError(f"{program} took no picture of {address}: {done.stderr[-2000:]}")


def _replayed(folder: Path) -> Path:
    """The recorded run as event files."""
    command = [sys.executable, str(PROJECT / "scripts" / "replay_dashboard.py")]
    recording = PROJECT / "scripts" / "dashboard_run.jsonl"
    subprocess.run([*command, str(recording), str(folder)], check=True, stdout=subprocess.DEVNULL)
    return folder


def _address(process: subprocess.Popen[bytes], log: IO[str]) -> str:
    """What the server says of itself, once it is up."""
    said = ""
    for _ in range(600):
        log.seek(0)
        said = log.read()
        found = re.search(r"TensorBoard [\w.]+ at (http://[\w.:]+/)", said)
        if found:
            return found[1]
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise RuntimeError(f"tensorboard has not come up: {said[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
