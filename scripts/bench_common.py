"""What the benchmarks share: the released library in its own folder, worker processes, tables.

Two libraries of one import name cannot live in one process, so each benchmark runs its cases in workers: this project's
in one, those of the released 0.2.2 in another. The parent imports no torch. A worker reads one JSON request a line on
stdin and writes one JSON reply a line on stdout; whatever else it prints goes to stderr.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import quantiles
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
PEER_RELEASE = "torch_remat==0.2.2"
PEER_DIR = PROJECT / ".cache" / "bench" / "torch_remat-0.2.2"


def add_peer_options(parser: Any) -> None:
    """Add the options that choose the folder of the released library."""
    parser.add_argument(
        "--peer-dir",
        type=Path,
        default=PEER_DIR,
        help="where torch_remat 0.2.2 is, or will be installed (its own folder)",
    )
    parser.add_argument("--no-peer", action="store_true", help="leave the released 0.2.2 out")
    parser.add_argument("--worker", choices=("ours", "peer"), help="internal: serve requests as this library's worker")


def install_peer(directory: Path) -> None:
    """Install the released library into `directory`, and nothing else, unless it is there."""
    if (directory / "torch_remat").is_dir():
        return
    print(f"installing {PEER_RELEASE} into {directory}", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(directory), "--no-deps", PEER_RELEASE]
    subprocess.run(command, check=True, timeout=600)


class Worker:
    """One process in which `torch_remat` is the library that lies in `library`."""

    def __init__(self, script: str, side: str, library: Path, arguments: Sequence[str] = ()) -> None:
        """Start `script` as worker `side`; `arguments` follow its `--worker` option."""
        environment = dict(os.environ, PYTHONPATH=str(library), OMP_NUM_THREADS="1", PYTHONHASHSEED="0")
        self._process = subprocess.Popen(
            [sys.executable, script, "--worker", side, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        try:
            self.info: dict[str, Any] = self.ask({"do": "start"})
            found = Path(self.info["library"]).resolve()
            if library.resolve() not in found.parents:
                raise RuntimeError(f"worker {side} imported {found}, expected the library in {library}.")
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its reply."""
        requests, replies = self._process.stdin, self._process.stdout
        if requests is None or replies is None:
            raise RuntimeError("the worker has no pipes.")
        print(json.dumps(request), file=requests, flush=True)
        line = replies.readline()
        if not line:
            raise RuntimeError(f"the worker ended with status {self._process.wait()} at request {request}.")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def start_workers(script: str, options: Any, arguments: Sequence[str] = ()) -> dict[str, Worker]:
    """The workers of a benchmark by side: `ours`, and `peer` unless it is left out."""
    workers = {"ours": Worker(script, "ours", PROJECT, arguments)}
    if not options.no_peer:
        install_peer(options.peer_dir)
        workers["peer"] = Worker(script, "peer", options.peer_dir, arguments)
    return workers


def serve(start: Callable[[], Callable[[dict[str, Any]], dict[str, Any]]]) -> int:
    """A worker's loop: `start` prepares and returns the function that answers requests."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import torch

    torch.set_num_threads(1)
    import torch_remat

    handle: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            handle = start()
            reply = {
                "library": torch_remat.__file__,
                "torch": torch.__version__,
                "python": ".".join(str(part) for part in sys.version_info[:3]),
            }
        elif handle is None:
            raise RuntimeError("the first request must be `start`.")
        else:
            reply = handle(request)
        print(json.dumps(reply), file=replies, flush=True)
    return 0


def sac_contexts() -> Any:
    """A context function for torch.utils.checkpoint that saves the outputs of matrix products and of attention."""
    import functools

    import torch
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    saved = {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def machine(info: dict[str, Any]) -> str:
    """What the figures were taken on, from a worker's start reply."""
    return f"torch {info['torch']}, Python {info['python']}, CPU, 1 thread of {os.cpu_count()} cores"


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table with aligned columns; the first `left` ones are text, the others figures."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * width if column < left else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows)])


def one_line(error: BaseException, limit: int = 160) -> str:
    """Type and first line of an error's text."""
    text = f"{type(error).__name__}: {str(error).strip()}".split("\n", maxsplit=1)[0]
    return text if len(text) <= limit else text[: limit - 3] + "..."


def failure_cell(why: str) -> str:
    """What a table shows for a case that ended with the error `why`.

    0.2.2 makes stand-ins for outputs that were not kept with a private torch binding that CPU-only builds do not have.
    """
    return "fails on this build" if "has no attribute '_" in why else "fails"
