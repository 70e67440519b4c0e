"""The contract suite on the compiled engine: what is expected to fail there, and why; what runs in every test run."""

from __future__ import annotations

import re

# Dynamo and AOTAutograd look at gradients of tensors that have none to look at, and warn of themselves and of what they
# leave to Python.
WARNINGS = (
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:Dynamo does not know how to trace:UserWarning",
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning",
)

# What of the suite is inherited: numbers, changes in place, how often bodies run, the ways into backward. Operations,
# one by one under every policy, take minutes: `make compiled-tests`.
_ALWAYS = ("TestP1ChangedInTheBody::", "TestP1ChangedBetween", "TestP2SaveBodyRunsOnce::", "TestP4Doors::")
_WHEN_ASKED = ("TestP1Operations::",)


def name_of(nodeid: str) -> str:
    """``TestClass::test_name[parameters]``, without the engine."""
    name = nodeid.partition("::")[2]
    return re.sub(r"\[compiled-?", "[", name).replace("[]", "")


def is_run(name: str, *, asked: bool) -> bool:
    """Whether the test runs on the compiled engine, ``asked`` for or in every test run."""
    if name in UNSTEADY or name.partition("[")[0] in UNSTEADY:
        return False
    return name.startswith(_ALWAYS) or (asked and name.startswith(_WHEN_ASKED))


def reason_of(name: str) -> str | None:
    """Why the test is expected to fail, or None."""
    whole = name.partition("[")[0]
    return next((reason for reason, tests in LIMITS.items() if name in tests or whole in tests), None)


LIMITS: dict[str, tuple[str, ...]] = {
    "AOTAutograd refuses double backward": ("TestP4Doors::test_p4_double_backward",),
    "the outputs of one graph have one backward together, with or without checkpoints": (
        "TestP4Doors::test_p4_disjoint_outputs_through_one_saved_region",
    ),
    "a change that backward cannot bear is refused by autograd, whose message does not name the checkpoint": (
        "TestP1ChangedInTheBody::test_p1_body_changes_its_input[True]",
        "TestP1ChangedInTheBody::test_p1_body_changes_its_input[None]",
    ),
    "a graph keeps its input to compute a change of it again: refused by autograd where only SAVE regions read it": (
        "TestP1ChangedInTheBody::test_p1_changed_input_that_only_a_save_region_reads",
    ),
    "an output that eager code returns as a view is a tensor of its own in one graph": (
        "TestP1Operations::test_p1_one_code_object_many_functions",
    ),
}
"""Reason -> tests; a name without parameters stands for all."""

UNSTEADY = {
    "TestP1Operations::test_p1_every_policy[fft]",
    "TestP4Doors::test_p4_autograd_grad_in_save_region_reaches_recomputed_code",
    "TestP4Doors::test_p4_autograd_grad_inside_the_body",
    "TestP4Doors::test_p4_retry_after_failed_replay",
    "TestP2SaveBodyRunsOnce::test_p2_whatever_the_backward[create_graph]",
}
"""Left out; a name without parameters stands for all. The last bits of a Fourier transform depend on where its input
lies in memory. Dynamo may trace ``torch.autograd.grad`` in a body, which AOTAutograd refuses, or leave it to Python. A
function in which an error was raised while Dynamo traced it is never compiled again in the process: see
``test_boundaries.py``. A double backward, which AOTAutograd refuses, works where Dynamo has left the body to Python.
"""
