"""Blocks as the host compiles them, whole or part by part: the policy holds, and tokens are counted once."""

import warnings
from collections import Counter

import pytest
import torch
from small_model import gradients, model
from titan_hosts import needs_0_3, python
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from torch_remat_titan.apply import apply_options
from torch_remat_titan.options import RematOptions
from torch_remat_titan.titan_0_2 import _fit_compiled_blocks

# Dynamo looks at every attribute of the tensors that it gets.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

NONE = frozenset()
AGAIN = {
    # All projections but the router's, and attention's softmax.
    "none": {"native_layer_norm": 3, "addmm": 9, "_softmax": 3},
    # The experts.
    "attention": {"native_layer_norm": 3, "addmm": 3, "_softmax": 0},
    "matmuls": {"native_layer_norm": 3, "addmm": 0, "_softmax": 0},
}
"""What three blocks that are compiled whole compute a second time."""
STATE_HOOKS = RematOptions(preset="none", state_hooks=("small_model:model",))
BITWISE = RematOptions(preset="none", determinism_check="bitwise")


@pytest.fixture(autouse=True)
def _fresh(fresh_compiler):
    """No compiled code of another test, and none left."""


def counting(runs):
    """A backend that counts the operations its graphs run."""

    def compiler(graph, inputs):
        names = Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function")

        def run(*args):
            runs.update(names)
            return graph(*args)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


def whole(of, backend, options=None):
    """Each block into one graph: all blocks of 0.3, those without experts of 0.2."""
    for block in of.layers.values():
        block.compile(backend=backend, fullgraph=True)


def parts(of, backend, options=None):
    """0.2 compiles the parts of a block with experts."""
    for block in of.layers.values():
        for parent, name in (
            (block, "attention_norm"),
            (block, "attention"),
            (block.moe, "router"),
        ):
            setattr(parent, name, torch.compile(getattr(parent, name), backend=backend, fullgraph=True))
    if options is not None:
        _fit_compiled_blocks(of, options, backend)


def two_steps(compiled, options):
    """Gradients of the second step, what it ran in compiled code, and the tokens counted in both."""
    policed, runs = model(), Counter()
    if options is not None:
        apply_options(policed, options, NONE)
    compiled(policed, counting(runs), options)
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        gradients(policed)
        runs.clear()
        found = gradients(policed)
    assert not [one for one in raised if "SAVE region" in str(one.message)]
    return found, runs, list(policed.buffers())


@pytest.mark.parametrize("preset", ["none", "attention", "matmuls"])
@pytest.mark.parametrize("compiled", [whole, parts])
def test_a_compiled_block_keeps_its_policy(compiled, preset):
    expected, plain, counted = two_steps(compiled, None)
    found, runs, tokens = two_steps(compiled, RematOptions(preset=preset))
    assert all(map(torch.equal, found, expected))
    assert plain["aten.topk.default"] == runs["aten.topk.default"] == 3, "the router of each block decides once"
    assert all(map(torch.equal, tokens, counted))
    assert {int(one.sum()) for one in tokens} == {2 * 3 * 2}, "two steps of three tokens with two experts each"
    if compiled is whole:
        again = {one: runs[f"aten.{one}.default"] - plain[f"aten.{one}.default"] for one in AGAIN[preset]}
        assert again == AGAIN[preset]


def test_a_block_that_ran_eagerly_can_be_compiled_afterwards():
    policed, plain = model(), model()
    apply_options(policed, RematOptions(preset="none"), NONE)
    gradients(policed)
    gradients(plain)
    for one in (policed, plain):
        whole(one, "aot_eager")
    assert all(map(torch.equal, gradients(policed), gradients(plain)))
    assert all(map(torch.equal, policed.buffers(), plain.buffers()))


@pytest.mark.parametrize("options", [BITWISE, STATE_HOOKS], ids=["bitwise", "state_hooks"])
def test_options_that_a_compiled_block_cannot_keep_are_refused_by_name(options):
    policed = model()
    apply_options(policed, options, NONE)
    for name, block in policed.layers.items():
        policed.layers[name] = torch.compile(block, backend="aot_eager", fullgraph=True)
    option = "determinism_check" if options is BITWISE else "state_hooks"
    with pytest.raises(ValueError, match=f"activation_checkpoint.{option} is (.|\n)*To fix: leave {option} out"):
        _fit_compiled_blocks(policed, options, "aot_eager")


def test_blocks_that_are_not_compiled_whole_keep_these_options():
    policed = model()
    apply_options(policed, BITWISE, NONE)
    parts(policed, "aot_eager", BITWISE)
    expected = model()
    parts(expected, "aot_eager")
    assert all(map(torch.equal, gradients(policed), gradients(expected)))


def test_parts_without_save_regions_stay_as_the_host_compiled_them():
    policed = model()
    apply_options(policed, RematOptions(preset="none"), NONE)
    parts(policed, "aot_eager")
    before = [(name, module) for name, module in policed.named_modules() if "attention" in name]
    routers = [block.moe.router for block in policed.layers.values()]
    keys = list(policed.state_dict())
    _fit_compiled_blocks(policed, RematOptions(preset="none"), "aot_eager")
    assert before == [(name, module) for name, module in policed.named_modules() if "attention" in name]
    for block, router in zip(policed.layers.values(), routers, strict=True):
        assert isinstance(block.moe.router, nn.Module)
        assert block.moe.router is not router
        assert block.moe.router._orig_mod is router._orig_mod
    assert keys == list(policed.state_dict())


@needs_0_3
def test_the_launcher_of_0_3_refuses_them_before_anything_is_built():
    done = python(
        "import sys\n"
        "sys.argv[1:] = ['--module=llama3', '--config=llama3_debugmodel', '--compile.enable',\n"
        "    '--activation_checkpoint.mode', 'remat', '--activation_checkpoint.preset', 'none',\n"
        "    '--activation_checkpoint.determinism_check', 'bitwise', *sys.argv[1:]]\n"
        "from torch_remat_titan.train import main\n"
        "main()\n"
    )
    assert done.returncode != 0
    assert "activation_checkpoint.determinism_check is bitwise, and compile.enable compiles whole" in done.stderr
