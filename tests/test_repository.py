"""Facts about the repository itself: what the core may import, what it exports, and the sizes of the house rules."""

import ast
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import torch_remat

PROJECT = Path(__file__).resolve().parents[1]
SOURCES = sorted([*PROJECT.glob("torch_remat/**/*.py"), *PROJECT.glob("integrations/**/*.py")])
OPTIONAL = ("rich", "scipy", "tensorboard", "tokenizers", "torchtitan", "triton")


def python(code: str) -> str:
    """What `code` prints in a fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_works_where_every_optional_package_is_missing():
    printed = python(
        "import sys\n"
        f"for name in {OPTIONAL!r}:\n"
        "    sys.modules[name] = None\n"
        "import torch, torch_remat as remat\n"
        "x = torch.ones(3, requires_grad=True)\n"
        "remat.checkpoint(region_name='block')(lambda t: remat.region(torch.exp, 'exp', recompute=False)(t).sin())(x)"
        ".sum().backward()\n"
        "print(torch.equal(x.grad, (x.exp().cos() * x.exp()).detach()))"
    )
    assert printed == "True\n"


def test_importing_the_core_imports_no_optional_package_that_torch_does_not():
    shown = "print(sorted({name.partition('.')[0] for name in sys.modules} & set(" + repr(OPTIONAL) + ")))"
    assert python(f"import sys, torch_remat\n{shown}") == python(f"import sys, torch\n{shown}")


def test_public_names_are_sorted_and_exist():
    assert list(torch_remat.__all__) == sorted(torch_remat.__all__)
    assert len(set(torch_remat.__all__)) == len(torch_remat.__all__)
    for name in torch_remat.__all__:
        assert getattr(torch_remat, name).__module__.startswith("torch_remat")


def test_the_version_has_one_source():
    try:
        installed = importlib.metadata.version("torch_remat")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torch_remat is on the path here but not installed")
    assert installed == torch_remat.__version__


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PROJECT)))
def test_no_file_over_600_lines_and_no_function_over_80(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 600
    assert [f"{name}: {lines} lines" for name, lines in functions(text) if lines > 80] == []


def functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and length of every function in `text`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            yield node.name, node.end_lineno - node.lineno + 1
