"""Run by `test_titan_families.py` in a process of its own: one step of torchtitan's Flux debug model, which needs text
encoders and images to train and neither to compute.

Prints JSON: preset -> whether loss and gradients have the digits of the model without checkpointing, replays, names.
"""

import importlib
import json
import sys
from importlib.metadata import version

from stand_ins import stand_in_for_missing_packages

from torch_remat_titan.cpu import prepare_cpu_host

prepare_cpu_host()
stand_in_for_missing_packages("safetensors", "torchvision", "transformers")

import torch  # noqa: E402

from torch_remat.runtime import events  # noqa: E402
from torch_remat_titan.apply import apply_options  # noqa: E402
from torch_remat_titan.options import RematOptions  # noqa: E402


def build():
    if version("torchtitan").startswith("0.2"):
        spec = importlib.import_module("torchtitan.protocols.train_spec").get_train_spec("flux")
        model = spec.model_cls(spec.model_args["flux-debug"])
    else:
        registry = importlib.import_module("torchtitan.models.flux.config_registry")
        model = registry.flux_debugmodel().model_spec.model.build()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    return model


def step(model):
    """One forward and backward on noise; the loss and all gradients."""
    generator = torch.Generator().manual_seed(5)
    image, text = torch.randn(1, 16, 64, generator=generator), torch.randn(1, 4, 4096, generator=generator)
    output = model(
        img=image,
        img_ids=torch.zeros(1, 16, 3),
        txt=text,
        txt_ids=torch.zeros(1, 4, 3),
        timesteps=torch.full((1,), 0.3),
        y=torch.randn(1, 768, generator=generator),
    )
    loss = output.square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def main():
    torch.set_num_threads(1)
    expected = step(build())
    found = {}
    replayed = []
    events.replay_started.subscribe(lambda tape: replayed.append(tape.name))
    for preset in ("none", "attention", "matmuls", "communication"):
        model = build()
        apply_options(model, RematOptions(preset=preset), frozenset({"tp"}))
        replayed.clear()
        got = step(model)
        same = all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
        found[preset] = {"same": same, "replayed": list(replayed)}
    found["nonzero"] = bool(expected[0]) and any(one.count_nonzero() for one in expected[1:])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
