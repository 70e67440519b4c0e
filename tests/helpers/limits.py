"""The contract suite on the compiled engine: what is expected to fail there, and why; what runs in every test run."""

from __future__ import annotations

import re

import torch

# Dynamo and AOTAutograd look at gradients of tensors that have none to look at, and warn of themselves and of what they
# leave to Python.
WARNINGS = (
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:Dynamo does not know how to trace:UserWarning",
    "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning",
)

# The rest takes a quarter of an hour: `make compiled-tests`.
_SLICE = ("TestP1ChangedInTheBody::", "TestP1ChangedBetween", "TestP2SaveBodyRunsOnce::", "TestP4Doors::")


def name_of(nodeid: str) -> str:
    """``TestClass::test_name[parameters]``, without the engine."""
    name = nodeid.partition("::")[2]
    return re.sub(r"\[compiled-?", "[", name).replace("[]", "")


def in_slice(name: str) -> bool:
    """Whether the test runs in every test run."""
    return name.startswith(_SLICE)


def reason_of(name: str) -> str | None:
    """Why the test is expected to fail, or None."""
    whole = name.partition("[")[0]
    if torch.__version__ < "2.14" and (name in SINCE_2_14 or whole in SINCE_2_14):
        return None
    return next((reason for reason, tests in LIMITS.items() if name in tests or whole in tests), None)


def is_unsteady(name: str) -> bool:
    """Whether the test may pass or fail there."""
    return name in UNSTEADY


LIMITS: dict[str, tuple[str, ...]] = {
    "a checkpoint in a graph has no second run of Python code: no placeholders, no drift, no replay to be counted": (
        "TestDrift::test_drift_of_saves[-1]",
        "TestIsPlaceholder::test_placeholder_metadata",
        *(f"TestIsPlaceholder::test_placeholder_views_are_placeholders[<lambda>{index}]" for index in range(7)),
        "TestIsPlaceholder::test_placeholder_can_be_printed",
        "TestIsPlaceholder::test_placeholder_is_false_for_everything_else",
        "TestP1DTensor::test_p1_dtensor_placeholder_keeps_placements",
        "TestP1WrapperSubclass::test_p1_two_tensor_placeholder_keeps_the_subclass",
        "TestP3Ways::test_p3_way_changes_and_the_region_runs_again[a reader more-from call 2 on]",
        "TestP3Ways::test_p3_way_changes_and_the_region_runs_again[a reader more-from call 3 on]",
        "TestP3Ways::test_p3_way_changes_and_the_region_runs_again[a reader more-from call 5 on]",
        "TestP3Ways::test_p3_way_changes_and_the_region_runs_again[a reader more-in calls 2, 3 and 5]",
        "TestP4SavedTensors::test_p4_split_backward_replays_once[----]",
    ),
    "AOTAutograd refuses double backward": (
        "TestP2SaveBodyRunsOnce::test_p2_whatever_the_backward[create_graph]",
        "TestP4Doors::test_p4_autograd_grad_inside_the_body",
        "TestP4Doors::test_p4_autograd_grad_in_save_region_reaches_recomputed_code",
        "TestP4Doors::test_p4_double_backward",
    ),
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
    "a default dtype that changes before backward reaches the compiler: last bits differ, without checkpoints too": (
        "TestP1Autocast::test_p1_default_dtype_changed_before_backward",
    ),
    "Dynamo cannot follow functions that deep": ("TestP1Bodies::test_p1_many_regions_and_deep_nesting",),
    "Dynamo's own objects hold arguments in cycles where the graph breaks, until the garbage collector runs": (
        "TestP5OneBlockAlive::test_p5_nothing_reachable_after_backward",
    ),
    "reads of a tensor's memory by other libraries in compiled parts are refused, by us or by Dynamo, not learned": (
        "TestP3UnseenReaders::test_p3_read_that_python_sees_is_learned[asarray]",
        "TestP3UnseenReaders::test_p3_read_that_python_sees_is_learned[from_dlpack]",
        "TestP3UnseenReaders::test_p3_with_a_profiler_nothing_is_learned_and_nothing_is_garbage[numpy]",
        "TestP3UnseenReaders::test_p3_with_a_profiler_nothing_is_learned_and_nothing_is_garbage[asarray]",
        "TestP3UnseenReaders::test_p3_with_a_profiler_nothing_is_learned_and_nothing_is_garbage[from_dlpack]",
    ),
    "what compiled code around a pointer reads is kept, so that there is nothing to refuse": (
        "TestP3UnseenReaders::test_p3_kernel_that_writes_into_a_placeholder",
        "TestP3UnseenReaders::test_p3_read_from_c_is_our_error_in_replay[data_ptr]",
        "TestP3UnseenReaders::test_p3_read_from_c_is_our_error_in_replay[data_ptr of a view]",
        "TestP3UnseenReaders::test_p3_read_from_c_is_our_error_in_replay[storage]",
    ),
}
"""Reason -> tests; a name without parameters stands for all."""

SINCE_2_14 = {
    "TestP3UnseenReaders::test_p3_with_a_profiler_nothing_is_learned_and_nothing_is_garbage[numpy]",
    "TestP4Doors::test_p4_autograd_grad_inside_the_body",
    "TestP4Doors::test_p4_autograd_grad_in_save_region_reaches_recomputed_code",
    "TestP4SavedTensors::test_p4_split_backward_replays_once[----]",
    "TestP5OneBlockAlive::test_p5_nothing_reachable_after_backward",
}
"""Of these, what passes on older builds, where Dynamo breaks the graph."""

UNSTEADY = {"TestP1Operations::test_p1_every_policy[fft]"}
"""Left out: the last bits of a Fourier transform depend on where its input lies in memory."""
