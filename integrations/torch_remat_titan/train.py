"""torchtitan's trainer with `activation_checkpoint.mode = "remat"`, the same on 0.2.x and 0.3.x.

    torchrun ... -m torch_remat_titan.train <the host's own arguments> --activation_checkpoint.mode remat \
        --activation_checkpoint.save_regions "attention.wo,feed_forward.*"

All the host's arguments keep their meaning, and its own modes are untouched. On a machine without an accelerator it
trains on CPU ranks over gloo.
"""

import difflib
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from torch_remat_titan.cpu import prepare_cpu_host, use_cpu_kernels_of_0_2
from torch_remat_titan.options import MODE, RematOptions
from torch_remat_titan.rows import write_rows_if_asked
from torch_remat_titan.versions import host_series

_SECTION = "activation_checkpoint"
_FLAGS = ("list_regions",)


def main() -> None:
    """Run the host's trainer with this process's command line.

    Raises:
        UnsupportedHostError: there is no torchtitan, or one that is not supported.
    """
    series = host_series()
    prepare_cpu_host()
    if series == "0.2":
        _run_0_2()
    else:
        _run_0_3()


def _run_0_2() -> None:
    # By name: only one of the two versions is installed, and each has its own modules and signatures.
    config: Any = importlib.import_module("torchtitan.config")
    host: Any = importlib.import_module("torchtitan.train")
    ours: Any = importlib.import_module("torch_remat_titan.job_config")

    merged = config.ConfigManager._merge_configs(config.JobConfig, ours.JobConfig)
    host.ConfigManager = functools.partial(config.ConfigManager, merged)

    def trainer(job_config: Any) -> Any:
        if job_config.model.name == "flux":
            return importlib.import_module("torchtitan.models.flux.train").FluxTrainer(job_config)
        return host.Trainer(job_config)

    use_cpu_kernels_of_0_2()
    write_rows_if_asked()
    host.main(trainer)


def _run_0_3() -> None:
    arguments, options = take_options(sys.argv[1:])
    sys.argv[1:] = arguments

    host: Any = importlib.import_module("torchtitan.train")
    from torch_remat_titan.activation_checkpoint import check_compiled, with_remat

    def changed(config: Any) -> Any:
        return check_compiled(config if options is None else with_remat(config, options))

    host.ConfigManager = _changed(host.ConfigManager, changed)
    write_rows_if_asked()
    host.main()


def _changed(manager: Any, change: Callable[[Any], Any]) -> Any:
    """The host's parser of configurations, whose results go through `change`."""

    class Changed(manager):
        def parse_args(self, *args: Any, **kwargs: Any) -> Any:
            return change(super().parse_args(*args, **kwargs))

    return Changed


def take_options(arguments: list[str]) -> tuple[list[str], RematOptions | None]:
    """Our options out of a command line of 0.3, which has no such section of its own; the rest is the host's.

    Raises:
        ValueError: an option of ours lacks its value, has a bad one, is misspelt, or comes with another mode or with a
            subcommand.
    """
    rest: list[str] = []
    found: dict[str, Any] = {}
    unknown: list[str] = []
    pending = iter(arguments)
    for argument in pending:
        name, equals, value = argument.partition("=")
        section, _, option = name.removeprefix("--").replace("-", "_").partition(".")
        if not name.startswith("--") or section != _SECTION or option not in {"mode", *_OPTIONS}:
            rest.append(argument)
            if name.startswith("--") and section == _SECTION:
                unknown.append(option)
        elif option in _FLAGS and not equals:
            found[option] = True
        else:
            value = value if equals else next(pending, None)
            if value is None:
                raise ValueError(f"{name} lacks its value.\nTo fix: {name} VALUE.")
            found[option] = value.lower() == "true" if option in _FLAGS else value
    mode = found.pop("mode", None)
    subcommand = any(argument.startswith(("activation-checkpoint:", "activation_checkpoint:")) for argument in rest)
    if subcommand and mode is None:
        return list(arguments), None  # the host parses the options of the subcommand
    if subcommand or mode not in (None, MODE):
        raise ValueError(
            f"--{_SECTION}.mode {mode}: on torchtitan 0.3 this option is for remat, the host's own choices are "
            f"subcommands.\nTo fix: activation-checkpoint:full (or selective, memory-budget, none) at the end of the "
            f"command line instead."
        )
    if mode is None:
        return list(arguments), None
    for option in unknown:
        near = difflib.get_close_matches(option, _OPTIONS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"--{_SECTION}.{option} is no option of activation_checkpoint.mode remat.\n"
            f"To fix: --{_SECTION}.{near}? All of them: {', '.join(_OPTIONS)}."
        )
    return rest, RematOptions.of(found)


_OPTIONS = tuple(RematOptions.__dataclass_fields__)

if __name__ == "__main__":
    main()
