"""Policies under FSDP2 and tensor parallelism, on two ranks."""

import policy_on_ranks
import pytest
from helpers.ranks import run_ranks, values

from torch_remat import apply_policy  # noqa: F401  (what is tested, imported here so that a broken one fails at once)


@pytest.mark.parametrize("order", [("policy", "fsdp"), ("fsdp", "policy")], ids="-".join)
def test_fsdp2_before_or_after_the_policy(order):
    for result in values(run_ranks(policy_on_ranks.fsdp, 2, order)):
        assert all(map(all, result["same"]))
        assert result["runs"] == {"8x6": 6, "6x8": 3, "8x16": 3, "16x8": 3}
        # hooks of blocks, and with them the gathering of weights, are not replayed
        assert (result["replayed"], result["as_without"], result["sharded"]) == (0, True, True)


@pytest.mark.parametrize("order", [("policy", "tp"), ("tp", "policy")], ids="-".join)
@pytest.mark.parametrize(
    ("save", "replayed"),
    [
        # Three blocks. A hook gathers before the attention and before the feed-forward part; a hook reduces behind wo,
        # which replay has to run for what follows, and behind w2, which nothing follows.
        ([], {"all_gather": 6, "reduce_scatter": 3}),
        (["attention.wo", "feed_forward.w2"], {"all_gather": 6}),
        (["attention", "feed_forward"], {}),
    ],
    ids=repr,
)
def test_collectives_of_hooks_belong_to_the_region_of_the_module(order, save, replayed):
    results = values(run_ranks(policy_on_ranks.tensor_parallel, 2, order, save))
    for result in results:
        assert all(result["same"])
        assert result["replayed"] == replayed
    assert results[0]["kinds"] == results[1]["kinds"]
