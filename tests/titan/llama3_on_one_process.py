"""Run by `test_titan_llama3.py` in a process of its own, because torchtitan settles on a device when it is imported.

Trains torchtitan's Llama 3 debug model one step per policy on the same batch and prints what happened as one JSON line.
"""

import hashlib
import json
import sys
from collections import Counter

from torch_remat_titan.cpu import prepare_cpu_host

prepare_cpu_host()

import torch  # noqa: E402
from torchtitan.config.override import apply_overrides  # noqa: E402

import torch_remat as remat  # noqa: E402
from torch_remat_titan import pretrain  # noqa: E402
from torch_remat_titan.activation_checkpoint import RematAC  # noqa: E402
from torch_remat_titan.measure import BlockMeter  # noqa: E402

BATCH, SEQ = 2, 64


def build(config, runs):
    """The debug model with fixed weights, SDPA and the policy of `config`; its leaf modules' calls count in `runs`."""
    apply_overrides(config.override, config)
    model = config.model_spec.model.build()
    torch.manual_seed(3)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    for block in model.layers.values():
        for path, module in block.named_modules():
            if not list(module.children()):
                count_runs(module, path, runs)
    keys = list(model.state_dict())
    names = [name for name, _ in model.named_modules()]
    if config.activation_checkpoint is not None:
        config.activation_checkpoint.build(dump_folder="").apply(model)
    return model, keys == list(model.state_dict()) and names == [name for name, _ in model.named_modules()]


def digest(tensor):
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def step(config):
    """Two steps of one policy, figures of the second: digests, runs of each leaf module per block, kept bytes."""
    runs = Counter()
    model, same_shape = build(config, runs)
    meter = BlockMeter(model)
    tokens = torch.randint(0, 2000, (BATCH, SEQ), generator=torch.Generator().manual_seed(5))
    for _ in range(2):
        runs.clear()
        model.zero_grad()
        meter.reset_counts()
        meter.arm()
        with remat.collect_trace() as trace:
            loss = model(tokens).logsumexp(-1).mean()
        loss.backward()
    return {
        "loss": repr(loss.item()),
        "gradients": {name: digest(parameter.grad) for name, parameter in model.named_parameters()},
        "same_shape": same_shape,
        "blocks": len(model.layers),
        "runs": {path: count / len(model.layers) for path, count in runs.items()},
        "replays": sum(meter.replays.values()),
        "kept_bytes": meter.kept_bytes,
        "regions": [entry.name for entry in trace.entries][:5] if config.activation_checkpoint else [],
    }


def count_runs(module, path, runs):
    """Count calls of the module's class-level forward: below any region, so a skipped SAVE body is not counted."""
    forward = type(module).forward

    class Counting(type(module)):
        def forward(self, *args, **kwargs):
            runs[path] += 1
            return forward(self, *args, **kwargs)

    module.__class__ = Counting


if __name__ == "__main__":
    refused = {}
    for option in ("preserve_rng_state", "debug"):
        try:
            RematAC.Config(preset="none", **{option: True}).build(dump_folder="")
        except ValueError as error:
            refused[option] = str(error)
    results = {name: step(getattr(pretrain, name)()) for name in ("none", "full", "regions")}
    json.dump({"refused": refused, **results}, sys.stdout)
