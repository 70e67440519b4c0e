"""Nothing prints unless asked, and what is said goes to one logger."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torch_remat

PACKAGE = Path(torch_remat.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

STEP = """
import logging
import torch
import torch_remat as remat

records = []
logging.getLogger().addHandler(type("All", (logging.Handler,), {"emit": lambda self, record: records.append(record)})())
logging.getLogger().setLevel(logging.DEBUG)


def block(x):
    h = remat.region(torch.exp, "wide", recompute=False)(torch.sin(x))
    return remat.region(torch.tanh, "narrow", recompute=True)(h).exp()


x = torch.zeros(8, 16, requires_grad=True)
for check in ("default", "none", "bitwise"):
    for _ in range(3):
        with remat.collect_trace():
            y = remat.checkpoint(region_name="layers.0", determinism_check=check)(block)(x)
        remat.saved_tensors_report(y).to_json()
        remat.format_oom_saved_tensors_report()
        y.sum().backward()
remat.verify_replay(block, x)
remat.profile_regions(block, x)
remat.explain(block, x)
with remat.install_oom_observer("nowhere"):
    block(x)
assert not [record for record in records if record.name.startswith("torch_remat")], records
"""


def test_a_step_and_every_tool_that_returns_data_print_and_log_nothing(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STEP],
        cwd=tmp_path,
        env={"PYTHONPATH": str(PACKAGE.parent), "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_one_logger_and_no_print(source: Path):
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        assert called != "print", f"{source.name}:{node.lineno}"
        if called.endswith("getLogger"):
            assert [ast.unparse(argument) for argument in node.args] == ["'torch_remat'"], (
                f"{source.name}:{node.lineno}"
            )
