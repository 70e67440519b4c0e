"""Run each test file of this folder under torchrun, pytest in every rank; show the ranks' logs of a file that fails.

    python multi_gpu_tests/run.py                        every file, two ranks
    python multi_gpu_tests/run.py test_fsdp2.py -k name  one file, further arguments for pytest

Exit status 1 when a file failed, hung past its time limit, or collected no test.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent


def main() -> int:
    """Run the files; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", help="names of test files in this folder (default: all)")
    parser.add_argument("--ranks", type=int, help="processes per file (default: `RANKS = ...` in the file, else 2)")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds one file may take (default 240)")
    options, pytest_arguments = parser.parse_known_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that a running file is ended too
    files = [HERE / name for name in options.files] or sorted(HERE.glob("test_*.py"))
    if not files:
        parser.error(f"no test_*.py in {HERE}")
    failed = [
        file.name for file in files if not _run(file, options.ranks or _ranks(file), options.timeout, pytest_arguments)
    ]
    if failed:
        print(f"multi-process tests FAILED: {', '.join(failed)}", file=sys.stderr)
        return 1
    return 0


def _ranks(file: Path) -> int:
    """How many ranks a file asks for."""
    found = re.search(r"^RANKS = (\d+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return int(found[1]) if found else 2


def _run(file: Path, ranks: int, timeout_seconds: float, pytest_arguments: list[str]) -> bool:
    """Run one file on `ranks` processes; print one line when it passed, every rank's log when it did not."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torchrun-") as logs:
        torchrun = ["--standalone", f"--nproc-per-node={ranks}", "--redirects=3", f"--log-dir={logs}"]
        # A rank that hangs in one test prints every thread's traceback and exits, before the time limit ends it mutely.
        hang = ["-o", f"faulthandler_timeout={0.75 * timeout_seconds}", "-o", "faulthandler_exit_on_timeout=true"]
        plugins = ["-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:xdist"]
        pytest = [*plugins, *hang, "-q", str(file), *pytest_arguments]
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *torchrun, "-m", "pytest", *pytest],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=PROJECT,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_seconds)
            verdict = "passed" if process.returncode == 0 else f"failed with exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            output, verdict = "", f"hung: not finished after {timeout_seconds:.0f} s"
        finally:
            _end(process)
        rank_logs = _rank_logs(Path(logs))
    seconds = time.monotonic() - started
    summaries = {log.strip().splitlines()[-1] for name, log in rank_logs.items() if "stdout" in name and log.strip()}
    print(f"{file.name}: {verdict} on {ranks} ranks in {seconds:.0f} s; {' | '.join(sorted(summaries))}", flush=True)
    if verdict == "passed":
        return True
    for name, log in rank_logs.items():
        print(f"\n-- {file.name}, {name}\n{log}")
    print(f"\n-- {file.name}, torchrun\n{output}", flush=True)
    return False


def _rank_logs(folder: Path) -> dict[str, str]:
    """What each rank wrote: "rank 0 stdout" -> text; torchrun keeps them as .../<rank>/{stdout,stderr}.log."""
    return {
        f"rank {path.parent.name} {path.stem}": path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(folder.rglob("*.log"))
    }


def _end(process: subprocess.Popen[str]) -> None:
    """Leave no rank behind: torchrun hands a SIGTERM on to its ranks, which are in sessions of their own."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


if __name__ == "__main__":
    sys.exit(main())
