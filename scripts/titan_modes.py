"""torchtitan's own modes of activation checkpointing beside ours: kept bytes, step time, replayed FLOPs.

    python scripts/titan_modes.py [--steps 7]

Llama 3 debug model of the installed torchtitan, one process on the CPU, float32, SDPA. Kept bytes as in
`torch_remat_titan/measure.py`: what stays alive from the blocks' forward to their backward. Replayed FLOPs are those of
the whole step above the step without checkpointing. The modes take turns, so that other load on the machine meets all.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT), str(PROJECT / "integrations")]

from torch_remat_titan.cpu import prepare_cpu_host  # noqa: E402

prepare_cpu_host()

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from torch_remat_titan.apply import apply_options  # noqa: E402
from torch_remat_titan.measure import BlockMeter  # noqa: E402
from torch_remat_titan.options import RematOptions  # noqa: E402

BATCH, SEQ = 4, 256
OURS = {
    "remat, preset none": RematOptions(preset="none"),
    "remat, preset attention": RematOptions(preset="attention"),
    "remat, attention and feed_forward.*": RematOptions(preset="attention", save_regions=("feed_forward.*",)),
    "remat, preset matmuls": RematOptions(preset="matmuls"),
}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each mode (default 7)")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    installed = version("torchtitan")
    build, modes = _version_0_2() if installed.startswith("0.2") else _version_0_3()
    modes = {"none": lambda model: model, **modes, **{name: _ours(options) for name, options in OURS.items()}}
    models = {name: apply(build()) for name, apply in modes.items()}
    figures = {name: _figures(model) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(steps):
        for name, model in models.items():
            # Time of this process alone, on its one thread: what else the machine does matters little.
            started = time.process_time()
            _step(model)
            seconds[name].append(time.process_time() - started)
    base, (_, least, _) = median(seconds["none"]), figures["none"]
    expected = figures["none"][2]
    print(f"torchtitan {installed}, torch {torch.__version__}, batch {BATCH}, sequence {SEQ}\n")
    print("| mode | kept bytes | CPU time of a step, of none | replayed GFLOPs | same digits |")
    print("|---|---:|---:|---:|---|")
    for name, (kept, flops, digits) in figures.items():
        ratio, replayed = median(seconds[name]) / base, (flops - least) / 1e9
        print(f"| {name} | {kept:,} | {ratio:.2f}x | {replayed:.2f} | {'yes' if digits == expected else 'NO'} |")


def _figures(model: nn.Module) -> tuple[int, int, list[str]]:
    """Kept bytes, FLOPs of a step, and its loss and gradients as text."""
    meter = BlockMeter(model)
    _step(model)
    meter.arm()
    _step(model)
    with FlopCounterMode(display=False) as flops:
        loss = _step(model)
    gradients = [float(one.grad.double().norm()) for one in model.parameters() if one.grad is not None]
    return meter.kept_bytes or 0, flops.get_total_flops(), [repr(loss), *map(repr, gradients)]


def _step(model: nn.Module) -> float:
    model.zero_grad()
    tokens = torch.randint(0, 2000, (BATCH, SEQ), generator=torch.Generator().manual_seed(5))
    loss = model(tokens).logsumexp(-1).mean()
    loss.backward()
    return loss.item()


def _ours(options: RematOptions) -> Callable[[nn.Module], nn.Module]:
    def apply(model: nn.Module) -> nn.Module:
        apply_options(model, options, frozenset())
        return model

    return apply


def _version_0_3() -> tuple[Callable[[], nn.Module], dict[str, Callable[[nn.Module], nn.Module]]]:
    pretrain: Any = importlib.import_module("torch_remat_titan.pretrain")
    overrides: Any = importlib.import_module("torchtitan.config.override")
    host: Any = importlib.import_module("torchtitan.distributed.activation_checkpoint")
    config = pretrain.none()
    overrides.apply_overrides(config.override, config)

    def build() -> nn.Module:
        model = config.model_spec.model.build()
        torch.manual_seed(3)
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        return model

    def hosts(kind: str) -> Callable[[nn.Module], nn.Module]:
        def apply(model: nn.Module) -> nn.Module:
            getattr(host, kind).Config().build(dump_folder="").apply(model)
            return model

        return apply

    return build, {"full": hosts("FullAC"), "selective": hosts("SelectiveAC")}


def _version_0_2() -> tuple[Callable[[], nn.Module], dict[str, Callable[[nn.Module], nn.Module]]]:
    table: Any = importlib.import_module("torchtitan.protocols.train_spec")
    host: Any = importlib.import_module("torchtitan.distributed.activation_checkpoint")
    llama: Any = importlib.import_module("torchtitan.models.llama3.infra.parallelize")
    config: Any = importlib.import_module("torchtitan.config").JobConfig()
    spec = table.get_train_spec("llama3")
    config.training.seq_len = SEQ

    def build() -> nn.Module:
        arguments = spec.model_args["debugmodel"]
        arguments.update_from_config(config)
        model = spec.model_cls(arguments)
        torch.manual_seed(3)
        with torch.no_grad():
            model.init_weights()
        return model

    def hosts(mode: str, option: str = "2") -> Callable[[nn.Module], nn.Module]:
        def apply(model: nn.Module) -> nn.Module:
            section = type(config.activation_checkpoint)(mode=mode, selective_ac_option=option)
            host.apply_ac(model, section, model_compile_enabled=False, op_sac_save_list=llama._op_sac_save_list)
            return model

        return apply

    return build, {
        "full": hosts("full"),
        "selective, every 2nd block": hosts("selective", "2"),
        "selective, op": hosts("selective", "op"),
    }


if __name__ == "__main__":
    main()
