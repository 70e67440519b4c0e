"""P9: any torch build. Private bindings are used behind a feature test, and the fallback keeps P1."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_remat

PACKAGE = Path(torch_remat.__file__).parent
TESTS = Path(__file__).parent.parent


def _dotted(node: ast.AST) -> str | None:
    """``torch._C._autograd`` for the expression of that name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None


def private_bindings() -> tuple[set[str], set[str]]:
    """Names under ``torch._C`` that the package reads: with a feature test (``getattr``), and directly."""
    tested, direct = set[str](), set[str]()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                dotted = _dotted(node.value)
                if dotted is not None and dotted.startswith("torch._C"):
                    aliases[node.targets[0].id] = dotted
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr")
            ):
                owner, name = _dotted(node.args[0]), node.args[1]
                owner = aliases.get(owner or "", owner)
                if owner and owner.startswith("torch._C") and isinstance(name, ast.Constant):
                    tested.add(f"{owner}.{name.value}")
            elif isinstance(node, ast.Attribute):
                dotted = _dotted(node)
                if dotted is None:
                    continue
                head, _, rest = dotted.partition(".")
                full = f"{aliases[head]}.{rest}" if head in aliases else dotted
                if full.startswith("torch._C."):
                    direct.add(full)
    return tested, direct


PROGRAM = """
import sys, os
sys.path[:0] = {paths!r}
import torch
import torch.distributed.pipelining._backward  # slow to import: once, before the forks
missing = {missing!r}

def run(names):
    for name in names:
        owner, _, last = name.rpartition(".")
        target = eval(owner)
        if hasattr(target, last):
            delattr(target, last)
    import contract_scenarios
    contract_scenarios.run_all()

failed = []
for names in [[name] for name in missing] + [missing]:
    child = os.fork()
    if child == 0:
        try:
            run(names)
        except BaseException:
            import traceback
            print("without", names, flush=True)
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        failed.append(names)
print("failed without:", failed)
sys.exit(bool(failed))
"""


@pytest.mark.skipif(not hasattr(sys, "setswitchinterval") or sys.platform == "win32", reason="needs fork")
def test_p9_fallbacks_keep_the_numbers() -> None:
    """Each feature-tested binding missing alone, and all of them missing at once."""
    tested, _ = private_bindings()
    assert tested, "no feature-tested binding was found: has the way to write them changed?"
    paths = [str(PACKAGE.parent), str(TESTS), str(TESTS / "contract")]
    program = PROGRAM.format(paths=paths, missing=sorted(tested))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]


def test_p9_direct_bindings_are_those_torch_itself_needs() -> None:
    """A private name used without a feature test must be one that torch's own Python code uses without one."""
    _, direct = private_bindings()
    root = Path(torch.__file__).parent
    sources = ["utils/checkpoint.py", "autograd/graph.py", "overrides.py", "_tensor.py", "utils/_python_dispatch.py"]
    sources += ["_subclasses/fake_tensor.py"]
    text = "\n".join((root / source).read_text() for source in sources)
    text += (root / "__init__.py").read_text() + (root / "_functorch/predispatch.py").read_text()
    text += (root / "autograd/__init__.py").read_text() + (root / "nn/parameter.py").read_text()
    unknown = {name for name in direct if hasattr(torch._C, name.split(".")[2]) and name.split(".")[-1] not in text}
    assert not unknown, f"used without a feature test: {sorted(unknown)}"


def test_p9_placeholders_need_no_accelerator_build() -> None:
    """On this build, CPU-only or not, a region's unread output is served without a private storage binding."""
    import torch_remat as remat

    x = torch.randn(3, requires_grad=True)
    output = remat.checkpoint(region_name="block")(lambda t: remat.region(torch.sin, "sin", recompute=False)(t))(x)
    output.sum().backward()
    assert torch.equal(x.grad, x.cos())
