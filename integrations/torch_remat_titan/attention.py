"""torchtitan override that swaps FlexAttention for SDPA, listed as `torch_remat_titan.attention.sdpa_attention`.

FlexAttention has no CPU backward, and where it has one its autotuning may choose other kernels in another process, so
that two runs of one job need not agree digit for digit. With SDPA attention is causal over the whole sequence: document
boundaries inside a packed sequence are not masked.
"""

from torchtitan.config.override import override
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention


@override(
    target=FlexAttention.Config, description="SDPA in place of FlexAttention: same kernels every run, also on CPU"
)
def sdpa_attention(config: FlexAttention.Config) -> ScaledDotProductAttention.Config:
    """The SDPA module with the sharding and initialisation that the FlexAttention module would have had."""
    return ScaledDotProductAttention.Config(param_init=config.param_init, sharding_config=config.sharding_config)
