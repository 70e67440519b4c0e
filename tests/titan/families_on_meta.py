"""Run by `test_titan_families.py` in a process of its own: every model family of the installed torchtitan, on meta.

Prints JSON: family -> the region names of each block, and what presets and a router save.
"""

import importlib
import json
import sys
from dataclasses import asdict
from importlib.metadata import version
from unittest.mock import MagicMock

from torch_remat_titan.cpu import prepare_cpu_host

prepare_cpu_host()

import torch  # noqa: E402

from torch_remat_titan.apply import BLOCKS, apply_options, check_options  # noqa: E402
from torch_remat_titan.options import PRESETS, RematOptions  # noqa: E402
from torch_remat_titan.presets import blocks_matching  # noqa: E402

FAMILIES_0_2 = {
    "llama3": "debugmodel",
    "llama4": "debugmodel",
    "qwen3": "debugmodel",
    "qwen3_moe": "debugmodel_moe",
    "deepseek_v3": "debugmodel",
    "gpt_oss": "debugmodel",
    "flux": "flux-debug",
}
FAMILIES_0_3 = {
    "llama3": "llama3_debugmodel",
    "qwen3": "qwen3_debugmodel",
    "qwen3_moe": "qwen3_moe_debug",
    "qwen3_5": "qwen35_debugmodel",
    "deepseek_v3": "deepseek_v3_debugmodel",
    "gpt_oss": "gpt_oss_debugmodel",
    "kimi_k2_7": "kimi_k2_5_debugmodel",
    "flux": "flux_debugmodel",
    "muse_glimmer": "muse_glimmer_debugmodel",
}
KERNELS = ("fla", "safetensors", "torchvision", "transformers")
"""Packages of kernels, images and text encoders that some families import and no meta model calls."""


def stand_in_for_missing_packages():
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] not in missing:
                return None
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

        def create_module(self, spec):
            module = MagicMock(name=spec.name)
            module.__spec__, module.__path__ = spec, []
            return module

        def exec_module(self, module):
            pass

    missing = [name for name in KERNELS if importlib.util.find_spec(name) is None]
    sys.meta_path.append(Finder())


def build_0_2(family):
    spec = importlib.import_module("torchtitan.protocols.train_spec").get_train_spec(family.removesuffix("_moe"))
    arguments = spec.model_args[FAMILIES_0_2[family]]
    config = importlib.import_module("torchtitan.config").JobConfig()
    if family != "flux":
        arguments.update_from_config(config)
    return spec.model_cls(arguments)


def build_0_3(family):
    registry = importlib.import_module(f"torchtitan.models.{family.removesuffix('_moe')}.config_registry")
    return getattr(registry, FAMILIES_0_3[family])().model_spec.model.build()


def facts(build, family):
    found = {}
    for preset in PRESETS:
        with torch.device("meta"):
            model = build(family)
        patterns = blocks_matching(model, BLOCKS)
        options = RematOptions(preset=preset, recompute_regions=("moe",) if preset == "none" and moe(model) else ())
        check_options(model, options, frozenset({"tp", "ep", "cp"}))
        keys = list(model.state_dict())
        report = apply_options(model, options, frozenset({"tp", "ep", "cp"}))
        found[preset] = [asdict(block) for block in report.blocks]
        found["blocks"] = patterns
        found["same_keys"] = keys == list(model.state_dict())
    return found


def moe(model):
    return any(name.endswith(".moe") for name, _ in model.named_modules())


def main():
    stand_in_for_missing_packages()
    old = version("torchtitan").startswith("0.2")
    families, build = (FAMILIES_0_2, build_0_2) if old else (FAMILIES_0_3, build_0_3)
    found = {}
    for family in families:
        try:
            found[family] = facts(build, family)
        except Exception as error:  # noqa: BLE001 - reported for the family, the others go on
            found[family] = {"error": f"{type(error).__name__}: {error}"}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
