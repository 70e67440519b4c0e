"""`activation_checkpoint.memory_dashboard`: the job writes a run of `torch_remat_tensorboard`; both versions.

Each trainer that this process makes is watched while it trains: a step of the dashboard after each of its own.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_remat_titan.options import SEVERAL, RematOptions

_WATCHED = "_torch_remat_watches"


def watch_trainers() -> None:
    """Have the host's trainers watched whose policy asks for a dashboard; once per process.

    Raises:
        ImportError: what the dashboard needs is not installed.
    """
    _dashboard_class()
    for module in ("torchtitan.trainer", "torchtitan.train", "__main__"):  # 0.3; 0.2, imported or run
        trainer = getattr(sys.modules.get(module), "Trainer", None)
        if trainer is not None and hasattr(trainer, "train") and not hasattr(trainer.train, _WATCHED):
            trainer.train = _watched(trainer.train)


def _dashboard_class() -> Any:
    try:
        return importlib.import_module("torch_remat_tensorboard").MemoryDashboard
    except ImportError as error:
        raise ImportError(
            f"activation_checkpoint.memory_dashboard needs TensorBoard, and it cannot be imported: {error}.\n"
            'To fix: pip install "torch_remat[tensorboard]", or leave the option empty.'
        ) from error


def _watched(train: Callable[..., Any]) -> Callable[..., Any]:
    """The host's training loop under a dashboard, where its configuration has one."""

    @functools.wraps(train)
    def watched(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        config = trainer.config if hasattr(trainer, "config") else trainer.job_config
        folder = getattr(config.activation_checkpoint, "memory_dashboard", "")
        if not folder:
            return train(trainer, *args, **kwargs)
        home = config.dump_folder if hasattr(config, "dump_folder") else config.job.dump_folder
        with _dashboard_class()(
            Path(home) / folder,
            mesh=trainer.parallel_dims.get_mesh("pp") if trainer.parallel_dims.pp_enabled else None,
            hparams=_hparams(RematOptions.collect(config.activation_checkpoint)),
        ) as dashboard:
            trainer.train_step = _then(trainer.train_step, lambda: dashboard.step(trainer.step))
            processor = trainer.metrics_processor
            processor.log = _first(processor.log, dashboard.note_peak)  # it resets the allocator's peak
            try:
                return train(trainer, *args, **kwargs)
            finally:
                del trainer.train_step, processor.log

    setattr(watched, _WATCHED, True)
    return watched


def _then(function: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        after()
        return result

    return both


def _first(function: Callable[..., Any], before: Callable[[], None]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        before()
        return function(*args, **kwargs)

    return both


def _hparams(options: RematOptions) -> dict[str, bool | float | str]:
    """The options that say something, as TensorBoard takes them."""
    values = {name: getattr(options, name) for name in options.__dataclass_fields__}
    values.update({name: ", ".join(values[name]) for name in SEVERAL})
    return {name: value for name, value in values.items() if value and name != "memory_dashboard"}
