"""Our launcher for families whose debug models need a GPU for one thing only, which gets a CPU stand-in here.

Started by torchrun as a script: `family_trainer.py <the host's arguments and ours>`. FlexAttention, which has no CPU
backward, is computed by plain operations with the same masks; image packages that the data code of multimodal families
imports, and that text never calls, are stand-ins. Blocks, their submodules and their numbers of calls are the host's.
"""

import importlib
from unittest.mock import MagicMock

from stand_ins import stand_in_for_missing_packages

from torch_remat_titan.cpu import prepare_cpu_host

prepare_cpu_host()

import torch  # noqa: E402
from torch.nn.attention.flex_attention import create_mask  # noqa: E402

from torch_remat_titan.train import main  # noqa: E402
from torch_remat_titan.versions import host_series  # noqa: E402


def attention(
    q,
    k,
    v,
    *,
    block_mask,
    score_mod=None,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    return_aux=None,
    kernel_options=None,
):
    """What `flex_attention` computes, operation by operation."""
    assert score_mod is None
    if enable_gqa:
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device=q.device)
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v
    if return_aux is not None:
        return out, MagicMock(lse=lse)
    return (out, lse) if return_lse else out


def with_bias(init_weights):
    """0.2 leaves the bias of GPT-OSS's routers as it finds it in memory, which deterministic runs fill with NaN."""

    def init(self, init_std):
        init_weights(self, init_std)
        if self.gate.bias is not None:
            torch.nn.init.zeros_(self.gate.bias)

    return init


stand_in_for_missing_packages("torchvision")
if host_series() == "0.2":
    wrapper = importlib.import_module("torchtitan.models.attention").FlexAttentionWrapper
    wrapper.forward = lambda self, q, k, v, **options: attention(q, k, v, **options)
    router = importlib.import_module("torchtitan.models.moe.moe").TokenChoiceTopKRouter
    router.init_weights = with_bias(router.init_weights)
else:
    wrapper = importlib.import_module("torchtitan.models.common.attention").FlexAttention
    wrapper.compiled_flex_attn = staticmethod(attention)
main()
