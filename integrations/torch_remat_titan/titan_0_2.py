"""torchtitan 0.2: `activation_checkpoint.mode = "remat"` in whatever model the job trains.

`install` wraps the host's table of models, so that a model gets its policy just before the host parallelizes it. The
host's own checkpointing is switched off for that model; its other modes are untouched.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from torch_remat.policy_calls import CheckpointForward, RegionCall
from torch_remat_titan.apply import apply_options, check_options, print_regions_and_exit
from torch_remat_titan.memory_dashboard import watch_trainers
from torch_remat_titan.options import MODE, RematOptions
from torch_remat_titan.versions import UnsupportedHostError, host_series

_installed = False


def install() -> None:
    """Let the host's models know the mode `remat`; once per process.

    Raises:
        UnsupportedHostError: the installed torchtitan is not 0.2.
    """
    global _installed
    if host_series() != "0.2":
        raise UnsupportedHostError(
            f"torch_remat_titan.job_config is for torchtitan 0.2.x; installed: {host_series()}.\n"
            "To fix: with 0.3.x use RematAC.Config in a config function, or python -m torch_remat_titan.train."
        )
    if _installed:
        return
    host: Any = importlib.import_module("torchtitan.protocols.train_spec")

    host.get_train_spec = _with_policy(host.get_train_spec)
    _installed = True


def _with_policy(get_train_spec: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.wraps(get_train_spec)
    def get(name: str) -> Any:
        spec = get_train_spec(name)
        return dataclasses.replace(
            spec,
            parallelize_fn=_Parallelize(spec.parallelize_fn),
            pipelining_fn=None if spec.pipelining_fn is None else _Pipeline(spec.pipelining_fn),
        )

    return get


@dataclasses.dataclass(frozen=True)
class _Parallelize:
    """The host's `parallelize_fn`, after our policy; `whole` where it gets the whole model and no stage of it."""

    host: Callable[..., nn.Module]
    whole: bool = True

    def __call__(self, model: nn.Module, parallel_dims: Any, job_config: Any) -> nn.Module:
        section = job_config.activation_checkpoint
        if section.mode != MODE:
            return self.host(model, parallel_dims, job_config)
        options = _options(section)
        parallel = _parallel(parallel_dims)
        if self.whole:
            _look_at_the_whole(model, options, parallel)
        if options.memory_dashboard:
            watch_trainers()
        report = apply_options(model, options, parallel)
        _logger().info("Applied activation checkpointing by torch_remat\n%s", report)
        with _switched_off(section):
            model = self.host(model, parallel_dims, job_config)
        if job_config.compile.enable:
            _fit_compiled_blocks(model, options, job_config.compile.backend)
        return model


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """The host's `pipelining_fn`, after a look at the whole model: a typo is reported once over all stages."""

    host: Callable[..., Any]

    def __call__(
        self,
        model: nn.Module,
        parallel_dims: Any,
        job_config: Any,
        device: torch.device,
        model_args: Any,
        parallelize_fn: Callable[..., nn.Module],
        loss_fn: Any,
    ) -> Any:
        section = job_config.activation_checkpoint
        if section.mode == MODE:
            _refuse_dual_pipe(job_config, parallel_dims)
            _look_at_the_whole(model, _options(section), _parallel(parallel_dims))
            if isinstance(parallelize_fn, _Parallelize):
                parallelize_fn = dataclasses.replace(parallelize_fn, whole=False)
        return self.host(model, parallel_dims, job_config, device, model_args, parallelize_fn, loss_fn)


def _options(section: Any) -> RematOptions:
    if not hasattr(section, "save_regions"):
        raise ValueError(
            "activation_checkpoint.mode is remat, and this job's configuration has no options of torch_remat.\n"
            'To fix: [job] custom_config_module = "torch_remat_titan.job_config"; a job with a config module of its '
            "own gives its JobConfig the field activation_checkpoint, a "
            "torch_remat_titan.job_config.ActivationCheckpoint."
        )
    return RematOptions.collect(section)


def _look_at_the_whole(model: nn.Module, options: RematOptions, parallel: frozenset[str]) -> None:
    if options.list_regions:
        print_regions_and_exit(model)
    check_options(model, options, parallel)


def _refuse_dual_pipe(job_config: Any, parallel_dims: Any) -> None:
    """The host refuses checkpointing together with DualPipeV and expert parallelism; it sees our mode here."""
    host: Any = importlib.import_module("torchtitan.distributed.dual_pipe_v")
    host.get_dual_pipe_v_flag(job_config, parallel_dims)


def _fit_compiled_blocks(model: nn.Module, options: RematOptions, backend: str) -> None:
    """Let what the host has compiled keep the policy.

    The host compiles a block whole, around its checkpoint, except where the block has experts: there it compiles each
    part by itself into one graph, and the checkpoint around the parts runs eagerly. No SAVE region can leave such a
    graph, so a part that has one in it may break its graph there.
    """
    from torch._dynamo import OptimizedModule

    for module in list(model.modules()):
        if isinstance(module, OptimizedModule) and _is_checkpoint(module._orig_mod):
            options.check_compiled()
        elif _is_checkpoint(module):
            for parent in list(module.modules()):
                for name, part in list(parent.named_children()):
                    if isinstance(part, OptimizedModule) and any(map(_is_save_region, part.modules())):
                        setattr(parent, name, torch.compile(part._orig_mod, backend=backend))


def _is_checkpoint(module: Any) -> bool:
    return isinstance(vars(module).get("forward"), CheckpointForward)


def _is_save_region(module: nn.Module) -> bool:
    call = vars(module).get("_call_impl")
    return isinstance(call, RegionCall) and not call.recompute


@contextmanager
def _switched_off(section: Any) -> Iterator[None]:
    mode, section.mode = section.mode, "none"
    try:
        yield
    finally:
        section.mode = mode


def _parallel(parallel_dims: Any) -> frozenset[str]:
    return frozenset(name for name in ("tp", "cp", "ep") if getattr(parallel_dims, f"{name}_enabled"))


def _logger() -> Any:
    from torchtitan.tools.logging import logger

    return logger
