"""The contract suite on the compiled engine: what fails there, and why; what runs in every test run."""

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

# Of the suite, what is compiled in every test run. All of it takes long: `make compiled-tests`.
_ALWAYS = ("TestP1ChangedInTheBody::", "TestP1ChangedBetween", "TestP2SaveBodyRunsOnce::", "TestP4Doors::")


def name_of(nodeid: str) -> str:
    """``TestClass::test_name[parameters]``, without the engine."""
    name = nodeid.partition("::")[2]
    return re.sub(r"\[compiled-?", "[", name).replace("[]", "")


def is_run(name: str, *, asked: bool) -> bool:
    """Whether the test runs on the compiled engine, ``asked`` for or in every test run."""
    return _reason(REPLAY, name) is None and (asked or name.startswith(_ALWAYS))


def reason_of(name: str, version: str = torch.__version__) -> str | None:
    """Why the test is expected to fail with this ``version`` of torch, or None."""
    reason = _reason({reason: tests for reason, tests in LIMITS.items() if _holds(reason, version)}, name)
    return None if reason is None else described(reason)


def described(reason: str) -> str:
    """The reason with the versions of torch that it holds for."""
    return reason + (f" (torch before {'.'.join(map(str, GONE_SINCE[reason]))})" if reason in GONE_SINCE else "")


def _holds(reason: str, version: str) -> bool:
    major, minor = version.split(".")[:2]
    return reason not in GONE_SINCE or (int(major), int(minor)) < GONE_SINCE[reason]


def _reason(table: dict[str, tuple[str, ...]], name: str) -> str | None:
    names = {name, name.partition("[")[0], name.partition("::")[0]}
    return next((reason for reason, tests in table.items() if not names.isdisjoint(tests)), None)


LIMITS: dict[str, tuple[str, ...]] = {
    "AOTAutograd refuses double backward": (
        "TestP2SaveBodyRunsOnce::test_p2_whatever_the_backward[create_graph]",
        "TestP4Doors::test_p4_double_backward",
        "TestP4Doors::test_p4_autograd_grad_inside_the_body",
        "TestP4Doors::test_p4_autograd_grad_in_save_region_reaches_recomputed_code",
    ),
    "the outputs of one graph have one backward together, with or without checkpoints": (
        "TestP4Doors::test_p4_disjoint_outputs_through_one_saved_region",
    ),
    "a change that backward cannot bear is refused by autograd, whose message does not name the checkpoint": (
        "TestP1ChangedInTheBody::test_p1_body_changes_its_input[True]",
        "TestP1ChangedInTheBody::test_p1_body_changes_its_input[None]",
        "TestP1ChangedSurroundings::test_p1_closed_over_tensor_changes[closure-in place]",
        "TestP1ChangedSurroundings::test_p1_closed_over_tensor_changes[attribute-in place]",
        "TestP1ChangedSurroundings::test_p1_closed_over_tensor_changes[buffer-in place]",
        "TestP1ChangedSurroundings::test_p1_closed_over_tensor_changes[dict-in place]",
        "TestP1TensorFromOutside::test_p1_changed_by_somebody_else",
        "TestP1Ways::test_p1_body_reaches_functions_that_call_each_other",
    ),
    "a change that eager code has to refuse may not matter to a graph, which saves other tensors and skips nothing": (
        "TestP1OutputsInOneMemory::test_p1_different_dtypes_are_refused",
        "TestP1TensorFromOutside::test_p1_read_and_modified[read, then modified-learned]",
        "TestP1TensorFromOutside::test_p1_read_and_modified[read, then modified-new path]",
        "TestP1TensorFromOutside::test_p1_read_and_modified[modified, then read-learned]",
        "TestP1TensorFromOutside::test_p1_read_and_modified[modified, then read-new path]",
        "TestP1TensorFromOutside::test_p1_read_and_modified[read on both sides-learned]",
        "TestP1TensorFromOutside::test_p1_read_and_modified[read on both sides-new path]",
        "TestP1TensorFromOutside::test_p1_read_and_modified[read through a view-learned]",
        "TestP1TensorFromOutside::test_p1_read_and_modified[read through a view-new path]",
        "TestP1ViewOfACapturedTensor::test_p1_the_refusal_comes_in_forward_and_names_the_region",
        "TestP1Ways::test_p1_region_changes_what_it_captured_on_a_new_path",
        "TestP8InPlace::test_p8_in_place_that_eager_refuses_is_refused",
    ),
    "a graph keeps its input to compute a change of it again: refused by autograd where only SAVE regions read it": (
        "TestP1ChangedInTheBody::test_p1_changed_input_that_only_a_save_region_reads",
    ),
    "an output that eager code returns as a view is a tensor of its own in one graph": (
        "TestP1Operations::test_p1_one_code_object_many_functions",
    ),
    "an output belongs to the node of its graph, not to that of the last operation": (
        "TestP8Identity::test_p8_output_is_the_body_s_tensor",
    ),
    "gradients of one tensor are summed in another order: other last bits than eager code has": (
        "TestP1Composition::test_p1_post_accumulate_hook_fires_once",
        "TestP8InPlace::test_p8_in_place_on_checkpoint_output[t_-None]",
        "TestP8InPlace::test_p8_in_place_on_checkpoint_output[t_-True]",
        "TestP8InPlace::test_p8_in_place_on_checkpoint_output[t_-False]",
    ),
    "no Python runs in the backward of a graph: nothing to count there, and nothing that may fail": (
        "TestP4SavedTensors::test_p4_split_backward_replays_once[----]",
        "TestP4SavedTensors::test_p4_split_backward_replays_once[RRRR]",
        "TestP7FailureLeavesNoTrace::test_p7_exception_in_replay",
        "TestP7FailureLeavesNoTrace::test_p7_keyboard_interrupt_is_cleaned_up_too",
        "TestP8Containers::test_p8_opaque_objects_are_the_same_objects_in_replay",
    ),
    "Dynamo gives up a function in which an error is raised while it traces it in replay; a retry is refused": (
        "TestP4Doors::test_p4_retry_after_failed_replay",
    ),
    "Dynamo traces no deeper than Python's recursion limit: sixty regions inside each other": (
        "TestP1Bodies::test_p1_many_regions_and_deep_nesting",
    ),
    "a compiled part that hands out a tensor in forward only is two graphs, which may save other tensors: refused": (
        "TestP4Doors::test_p4_escaped_intermediate_alone",
        "TestP4Doors::test_p4_escaped_intermediates_and_output_in_turn",
    ),
    "what is compiled saves what its graph needs: neither the tensors of eager code nor their number": (
        "TestSavedTensorsHooks::test_hooks_kinds_order_and_unpacks",
        "TestSavedTensorsHooks::test_hooks_see_detached_saves_and_live_inputs",
    ),
    "hooks around the call of one graph pack without `current_saved_tensor_info()` and without `capture_context`": (
        "TestSavedTensorsHooks::test_hooks_native_pair_gives_info_for_every_kind",
        "TestSavedTensorsHooks::test_hooks_capture_context",
    ),
    "views have no `_base` in a graph": (
        "TestSavedTensorsHooks::test_hooks_region_that_returns_another_part_of_its_argument_s_memory",
    ),
    "AOTAutograd takes no inference tensors for backward": (
        "TestP1OtherKinds::test_p1_inference_tensor_as_argument[True]",
        "TestP1OtherKinds::test_p1_region_that_makes_an_inference_tensor",
    ),
    "tracing leaves objects to the garbage collector": (
        "TestP5OneBlockAlive::test_p5_nothing_reachable_after_backward",
        "TestP5OneBlockAlive::test_p5_nothing_reachable_after_forward_alone",
    ),
    "dropout in eval mode copies its input in a graph, with or without checkpoints": tuple(
        f"TestP8Identity::test_p8_pass_through[{policy}-{kind}]"
        for policy in ("save", "rec")
        for kind in ("leaf", "non-leaf", "no grad", "parameter")
    ),
    "what is compiled has no forward-mode AD, with or without checkpoints, and torch compiles for it": (
        "TestP8ForwardMode",
    ),
    "backend aot_eager recomputes under the autocast and the default dtype that backward is called under": (
        "TestP1Autocast::test_p1_backward_inside_another_autocast",
        "TestP1Autocast::test_p1_default_dtype_changed_before_backward",
    ),
}
"""Reason -> tests that are expected to fail; a name without parameters stands for all."""

GONE_SINCE: dict[str, tuple[int, int]] = {
    "dropout in eval mode copies its input in a graph, with or without checkpoints": (2, 14),
    "what is compiled has no forward-mode AD, with or without checkpoints, and torch compiles for it": (2, 14),
}
"""Reason -> the first version of torch without that limit, where its tests have to pass."""

REPLAY: dict[str, tuple[str, ...]] = {
    "SAVE regions change in place what they captured, and replay skips them: a graph skips nothing": (
        "TestP1PoliciesThatChange",
        "TestP1WritesBesideAnArgument",
    ),
    "replay meets another body than forward did: a graph has no replay that could": ("TestDrift",),
    "random numbers that replay would draw anew are refused: a graph keeps them, or draws the same again": (
        "TestP1RandomNumbers::test_p1_refused_without_a_hook",
        "TestP1RandomNumbers::test_p1_refused_when_it_first_happens_in_step_three",
        "TestP1RandomNumbers::test_p1_random_numbers_of_one_way_of_a_body",
        "TestP1ThreadsAndRandomNumbers",
    ),
    "what a failed replay has filled is not used: a graph fills nothing": ("TestP7NothingOfAFailedReplayIsUsed",),
    "placeholders stand for what replay skips: a graph has none": (
        "TestIsPlaceholder",
        "TestP1DTensor::test_p1_dtensor_placeholder_keeps_placements",
        "TestP1WrapperSubclass::test_p1_two_tensor_placeholder_keeps_the_subclass",
        "TestP3OnMissing",
        "TestP3UnseenReaders",
        "TestP3Operations",
        "TestP3Threads",
        "TestP3Ways",
    ),
    "bytes alive are counted under a dispatch mode, under which nothing is compiled; for graphs see tests/compile": (
        "TestP3KeptBytes",
        "TestP3Tables",
        "TestP3Integers",
        "TestP3Inputs",
        "TestP3SecondBlock",
        "TestP3InPlace",
        "TestP3HookPairs",
        "TestP3DenseBodies",
        "test_p3_random_graphs",
    ),
    "a trace lists the regions that the eager runtime enters": ("TestTraces",),
    "the body makes references to memory that Dynamo cannot trace": (
        "TestP5OneBlockAlive::test_p5_saves_go_when_an_escaped_intermediate_dies",
    ),
    "torch compiles DTensors for the first process group of a process only; multi_gpu_tests compile them": (
        "TestP1DTensor::test_p1_dtensor",
    ),
    "many functions, compiled one by one, take minutes": (
        "TestP1Bodies::test_p1_a_hundred_checkpoints",
        "TestP1Ways::test_p1_many_variants_of_one_generic_body",
    ),
}
"""Reason -> tests about the replay of eager code, and a few others, not compiled; a class stands for its tests."""
