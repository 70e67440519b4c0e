"""What torchtitan takes from an accelerator and a CPU host must be given instead.

Everything here happens only where torch sees no accelerator, and must happen before torchtitan is imported: torchtitan
decides at import which device it runs on.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

OFFLINE_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "WANDB_MODE": "disabled"}
"""Keeps the libraries under torchtitan from asking the network for anything."""

_prepared = False


def has_accelerator() -> bool:
    """Whether torch sees a device that torchtitan can train on, other than the CPU."""
    return torch.accelerator.is_available()


def prepare_cpu_host() -> bool:
    """Make torchtitan importable and trainable on CPU ranks over gloo; does nothing where there is an accelerator.

    Returns:
        Whether this host trains on the CPU.

    Raises:
        RuntimeError: torchtitan is imported already and has settled on another device.
    """
    global _prepared
    for name, value in OFFLINE_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if has_accelerator():
        return False
    if _prepared:
        return True
    if "torchtitan.tools.utils" in sys.modules:
        raise RuntimeError(
            "torchtitan was imported before prepare_cpu_host() and has already looked for an accelerator.\n"
            "To fix: call torch_remat_titan.cpu.prepare_cpu_host() before the first import of torchtitan."
        )
    _name_the_cpu_as_device()
    _give_torch_cpu_the_device_module_functions()
    _let_fsdp_reduce_over_gloo()
    _give_the_cpu_integer_histograms()
    _prepared = True
    return True


def use_cpu_kernels_of_0_2() -> None:
    """Let the experts of 0.2 sort their tokens without a GPU kernel, where there is no accelerator.

    Imports torchtitan; call it after `prepare_cpu_host`.
    """
    if not has_accelerator():
        experts: Any = importlib.import_module("torchtitan.models.moe.utils")
        experts.generate_permute_indices = functools.partial(experts.generate_permute_indices, use_cpu=True)


def _name_the_cpu_as_device() -> None:
    """torchtitan asks torch for the available device type and falls back to "cuda" when the answer is None."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"


def _give_torch_cpu_the_device_module_functions() -> None:
    """The trainer, its seed set-up and its memory monitor call these on the device module, here `torch.cpu`."""
    total_memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    functions: dict[str, Callable[..., Any]] = {
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: SimpleNamespace(name="cpu", total_memory=total_memory_bytes),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        # A barrier wants a device index; torch.cpu.current_device() returns the string "cpu".
        "current_device": lambda: 0,
    }
    for name, function in functions.items():
        setattr(torch.cpu, name, function)


def _let_fsdp_reduce_over_gloo() -> None:
    """gloo has no pre-multiplied sum, which FSDP2 uses once a gradient divide factor is set: force plain sums."""
    from torch.distributed.fsdp import FSDPModule

    set_divide_factor = FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(self: FSDPModule, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)
        set_divide_factor(self, factor)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor


def _give_the_cpu_integer_histograms() -> None:
    """The routers of 0.2 count tokens per expert with `torch.histc` on integers, which only accelerators have."""
    histc = torch.histc

    def histc_of_integers(input: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:  # noqa: A002
        if input.is_floating_point() or input.device.type != "cpu":
            return histc(input, *args, **options)
        # Expert numbers and token counts are far below the integers that float64 cannot hold.
        return histc(input.double(), *args, **options).to(input.dtype)

    torch.histc = histc_of_integers
