"""Run by `test_titan_families.py` in a process of its own: every model family of the installed torchtitan, on meta.

Prints JSON: family -> the region names of each block, and what presets and a router save; and what each recipe does.
"""

import importlib
import json
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from stand_ins import stand_in_for_missing_packages

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


def recipes_0_2():
    """Each TOML file with the model it is for."""
    config = importlib.import_module("torchtitan.config")
    ours = importlib.import_module("torch_remat_titan.job_config")
    specs = importlib.import_module("torchtitan.protocols.train_spec")
    manager = config.ConfigManager(config.ConfigManager._merge_configs(config.JobConfig, ours.JobConfig))
    for path in sorted((Path(__file__).resolve().parents[2] / "scripts" / "titan_configs").glob("*.toml")):
        parsed = manager.parse_args(["--job.config_file", str(path)])
        assert parsed.activation_checkpoint.mode == "remat"
        assert parsed.job.custom_config_module == "torch_remat_titan.job_config"
        spec = specs.get_train_spec(parsed.model.name)
        arguments = spec.model_args[parsed.model.flavor]
        arguments.update_from_config(parsed)
        yield path.stem, lambda spec=spec, arguments=arguments: spec.model_cls(arguments), parsed.activation_checkpoint


def recipes_0_3():
    """Each configuration with its model."""
    module = importlib.import_module("torch_remat_titan.recipes")
    for name, recipe in vars(module).items():
        if name.endswith("_remat") and name != "with_remat":
            config = recipe()
            yield name, config.model_spec.model.build, config.activation_checkpoint


def what_recipes_do(recipes):
    found = {}
    for name, build, section in recipes:
        with torch.device("meta"):
            model = build()
        options = RematOptions.collect(section)
        check_options(model, options, frozenset())
        found[name] = [asdict(block) for block in apply_options(model, options, frozenset()).blocks]
    return found


def main():
    stand_in_for_missing_packages("fla", "safetensors", "torchvision", "transformers")
    old = version("torchtitan").startswith("0.2")
    families, build = (FAMILIES_0_2, build_0_2) if old else (FAMILIES_0_3, build_0_3)
    found = {}
    for family in families:
        try:
            found[family] = facts(build, family)
        except Exception as error:  # noqa: BLE001 - reported for the family, the others go on
            found[family] = {"error": f"{type(error).__name__}: {error}"}
    found["recipes"] = what_recipes_do(recipes_0_2() if old else recipes_0_3())
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
