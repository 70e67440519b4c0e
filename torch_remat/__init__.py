"""torch_remat: region-based activation checkpointing for PyTorch. The usual alias is ``remat``."""

from torch_remat.checkpoint import Checkpointed, checkpoint
from torch_remat.diagnostics.allocations import clear_memory_snapshot_cache, memory_snapshot_annotate
from torch_remat.diagnostics.explain import explain
from torch_remat.diagnostics.graph import discover_autograd_roots
from torch_remat.diagnostics.memory import (
    current_memory_report,
    format_current_memory_report,
    format_saved_tensors_report,
    print_current_memory_report,
    print_saved_tensors_report,
    saved_tensors_report,
)
from torch_remat.diagnostics.oom import (
    format_oom_saved_tensors_report,
    install_oom_observer,
    oom_observer,
    oom_report,
)
from torch_remat.diagnostics.prices import profile_regions
from torch_remat.diagnostics.rank_check import install as _check_ranks
from torch_remat.diagnostics.trace import collect_trace, trace_scope
from torch_remat.diagnostics.verify import verify_replay
from torch_remat.policy import PolicyReport, RegionListing, apply_policy, available_regions
from torch_remat.policy_calls import CheckpointForward, RegionCall
from torch_remat.region import name_scope, recompute_needs_tensor, region, save_for_backward
from torch_remat.runtime.dynamo import keep_dynamo_out
from torch_remat.runtime.frame import is_recomputing
from torch_remat.runtime.generators import GeneratorHook
from torch_remat.runtime.hooks import SavedTensorInfo, SavedTensorKind, current_saved_tensor_info, saved_tensors_hooks
from torch_remat.runtime.placeholder import is_placeholder
from torch_remat.runtime.state_hooks import RecomputeStateHook

__version__ = "0.3.0"

keep_dynamo_out(__name__, *(kind.__call__.__code__ for kind in (Checkpointed, CheckpointForward, RegionCall)))
_check_ranks()

__all__ = [
    "GeneratorHook",
    "PolicyReport",
    "RecomputeStateHook",
    "RegionListing",
    "SavedTensorInfo",
    "SavedTensorKind",
    "apply_policy",
    "available_regions",
    "checkpoint",
    "clear_memory_snapshot_cache",
    "collect_trace",
    "current_memory_report",
    "current_saved_tensor_info",
    "discover_autograd_roots",
    "explain",
    "format_current_memory_report",
    "format_oom_saved_tensors_report",
    "format_saved_tensors_report",
    "install_oom_observer",
    "is_placeholder",
    "is_recomputing",
    "memory_snapshot_annotate",
    "name_scope",
    "oom_observer",
    "oom_report",
    "print_current_memory_report",
    "print_saved_tensors_report",
    "profile_regions",
    "recompute_needs_tensor",
    "region",
    "save_for_backward",
    "saved_tensors_hooks",
    "saved_tensors_report",
    "trace_scope",
    "verify_replay",
]
