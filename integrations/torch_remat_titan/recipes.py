"""torchtitan 0.3 configurations to start from: `--module torch_remat_titan.recipes --config NAME`.

Each is one of the host's own configurations with regions in place of its activation checkpointing. The same for 0.2 are
the TOML files in `scripts/titan_configs/`.
"""

from typing import Any

from torch_remat_titan.activation_checkpoint import with_remat
from torch_remat_titan.options import RematOptions

ATTENTION_AND_FEED_FORWARD = RematOptions(
    save_regions=("attention.inner_attention", "attention.wo", "feed_forward.*"),
)
"""Llama 3 and dense Qwen 3: what is left to replay are the norms, the query, key and value projection, and SiLU."""

ROUTED_EXPERTS = RematOptions(
    save_regions=(
        "attention.inner_attention",
        "attention.wo",
        "moe.routed_experts",
        "moe.shared_experts",
        "feed_forward",
    ),
)
"""DeepSeek V3 and the other MoE models: experts with their dispatch and combine run once."""


def llama3_debugmodel_remat() -> Any:
    """The Llama 3 debug model."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    return with_remat(llama3_debugmodel(), ATTENTION_AND_FEED_FORWARD)


def llama3_8b_remat() -> Any:
    """Llama 3 8B; the last block is no checkpoint: its backward comes first."""
    from torchtitan.models.llama3.config_registry import llama3_8b

    options = RematOptions(
        save_regions=ATTENTION_AND_FEED_FORWARD.save_regions,
        layer_overrides=("layers.31=off",),
    )
    return with_remat(llama3_8b(), options)


def deepseek_v3_debugmodel_remat() -> Any:
    """The DeepSeek V3 debug model."""
    from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

    return with_remat(deepseek_v3_debugmodel(), ROUTED_EXPERTS)


def qwen3_debugmodel_remat() -> Any:
    """The Qwen 3 debug model."""
    from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

    return with_remat(qwen3_debugmodel(), ATTENTION_AND_FEED_FORWARD)
