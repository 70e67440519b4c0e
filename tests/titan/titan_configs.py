"""torchtitan 0.3 configurations for the tests' jobs: `--module titan_configs --config NAME`."""


def kimi_on_text():
    """Kimi's debug model with its vision encoder, which text leaves alone; AdamW in place of the distributed Muon."""
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
    from torchtitan.models.kimi_k2_7.config_registry import kimi_k2_5_debugmodel

    config = kimi_k2_5_debugmodel()
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="c4_test")
    config.tokenizer = HuggingFaceTokenizer.Config()
    config.optimizer = default_adamw(lr=8e-4)
    return config


STAGES = [["tok_embeddings"], [*(f"layers.{index}" for index in range(6)), "norm"]]
"""Two pipeline stages, the first without a block; the name of the output projection differs between versions."""


def llama3_with_a_stage_without_blocks():
    """Llama 3's debug model in those stages."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.parallelism.module_fqns_per_model_part = [STAGES[0], [*STAGES[1], "lm_head"]]
    return config
