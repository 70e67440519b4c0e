"""Which tests run with which torchtitan, and how a test runs code in a process of its own."""

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def _series() -> str | None:
    try:
        return ".".join(version("torchtitan").split(".")[:2])
    except PackageNotFoundError:
        return None


SERIES = _series()
"""First two parts of the installed torchtitan's version; None where there is none."""

needs_0_2 = pytest.mark.skipif(SERIES != "0.2", reason="needs torchtitan 0.2.x, which goes with torch 2.13")
needs_0_3 = pytest.mark.skipif(SERIES != "0.3", reason="needs torchtitan 0.3.x, which goes with torch 2.14")
needs_any = pytest.mark.skipif(SERIES is None, reason="torchtitan is not installed here (extra: titan)")


def environment(**more: str) -> dict[str, str]:
    """This process's environment in which the two packages and the tests' helpers are found."""
    paths = [PROJECT, PROJECT / "integrations", Path(__file__).parent]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1", **more}


def python(code: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment(**more))
