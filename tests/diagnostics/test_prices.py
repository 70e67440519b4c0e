"""``profile_regions``: bytes are those that saving really keeps, FLOPs those of the formulas; also on meta and fake."""

import json
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.alive import gc_off, live_tensors
from helpers.events import Hidden
from test_memory_phases import Block, llama, run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_remat as remat
from torch_remat.diagnostics import prices
from torch_remat.diagnostics.price_table import PriceList, RegionPrice

TOKENS, DIM, HIDDEN, HEADS = 2 * 8, 16, 48, 2
KEPT = {
    "core": 4 * TOKENS * DIM + 4 * TOKENS * HEADS,  # its output and the log-sum-exp
    "wo": 4 * TOKENS * DIM,
    "w1": 4 * TOKENS * HIDDEN,
    "w3": 4 * TOKENS * HIDDEN,
    "w2": 0,  # added to the residual only: nobody needs its value
}
FLOPS = {
    "core": 2 * 2 * TOKENS * 8 * DIM,
    "wo": 2 * TOKENS * DIM * DIM,
    **dict.fromkeys(("w1", "w3", "w2"), 2 * TOKENS * DIM * HIDDEN),
}


def by_region(report: PriceList) -> dict[str, RegionPrice]:
    return {one.region: one for one in report.regions}


class TestPrices:
    def test_a_llama_block_in_bytes_and_flops(self):
        blocks, data = llama(1)
        for function in (blocks[0], remat.checkpoint(region_name="layers.0")(blocks[0])):
            found = by_region(remat.profile_regions(function, data))
            assert {name: one.kept_bytes for name, one in found.items()} == KEPT
            assert {name: one.flops for name, one in found.items()} == FLOPS
            assert all(one.seconds is not None and one.seconds > 0 for one in found.values())
            assert all(one.policy == "save" for one in found.values())

    def test_fake_tensors_give_the_same_bytes_and_flops_without_memory(self):
        with FakeTensorMode():
            block, data = Block(DIM, HIDDEN, HEADS), torch.zeros(2, 8, DIM)
            found = by_region(remat.profile_regions(block, data))
        assert {name: one.kept_bytes for name, one in found.items()} == KEPT
        assert {name: one.flops for name, one in found.items()} == FLOPS
        assert all(one.seconds is None for one in found.values())

    def test_a_block_of_70b_on_meta(self):
        with torch.device("meta"):
            block, data = Block(8192, 28672, 64), torch.zeros(1, 4096, 8192)
        found = by_region(remat.profile_regions(block, data))
        assert found["w1"].kept_bytes == 4 * 4096 * 28672
        assert found["w2"].kept_bytes == 0
        assert found["w2"].flops == 2 * 4096 * 8192 * 28672
        assert found["w1"].seconds is None

    def test_saving_one_region_keeps_what_the_price_says(self):
        """The price against the report of a step in which the policy is so."""
        policy: dict[str, bool] = {}

        def body(x: Tensor) -> Tensor:
            h = remat.region(torch.exp, "exp", recompute="exp" not in policy)(torch.sin(x))
            h = remat.region(lambda t: t.cumsum(-1) * t, "mix", recompute="mix" not in policy)(h)
            return remat.region(F.gelu, "gelu", recompute="gelu" not in policy)(h) * h

        x = torch.zeros(4, 6, requires_grad=True)
        found = by_region(remat.profile_regions(body, x))
        for name in ("exp", "mix", "gelu"):
            policy.clear()
            policy[name] = True
            y = remat.checkpoint(region_name=name)(body)(x)
            y = remat.checkpoint(region_name=name)(body)(x)
            assert remat.saved_tensors_report().region_bytes == found[name].kept_bytes, name
            del y

    def test_the_policy_that_is_there_makes_no_difference_to_the_price(self):
        def body(x: Tensor, recompute: bool) -> Tensor:
            return remat.region(torch.exp, "e", recompute=recompute)(torch.sin(x)).sin()

        x = torch.zeros(4, 6, requires_grad=True)
        saved, recomputed = (by_region(remat.profile_regions(body, x, flag))["e"] for flag in (False, True))
        assert (saved.policy, recomputed.policy) == ("save", "recompute")
        assert saved.kept_bytes == recomputed.kept_bytes == 96

    @pytest.mark.parametrize("shape", [(6, 4), (1, 6, 4)])
    def test_what_else_is_alive_makes_no_difference_to_the_price(self, shape: tuple[int, ...]):
        linear = torch.nn.Linear(4, 5)

        def body(x: Tensor) -> Tensor:
            return remat.region(linear, "wq", recompute=False)(x).sin()

        x = torch.zeros(shape) + 1
        alone = by_region(remat.profile_regions(body, x))["wq"].kept_bytes
        same = remat.checkpoint(region_name="a")(body)(x)  # its region has saved x, too
        assert by_region(remat.profile_regions(body, x))["wq"].kept_bytes == alone
        assert remat.saved_tensors_report(same).region_bytes == alone

    def test_random_operations_and_training_state(self):
        x = torch.zeros(4, 6, requires_grad=True)
        found = by_region(remat.profile_regions(lambda t: remat.region(F.dropout, "d", recompute=True)(t).exp(), x))
        assert found["d"].kept_bytes is not None
        assert x.grad is None

    def test_a_region_that_cannot_be_saved_says_so(self):
        def body(x: Tensor) -> Tensor:
            h = torch.sin(x)
            y = h.exp()
            remat.region(lambda t: y.mul_(2), "changes", recompute=True)(x)
            return torch.tanh(y)

        (price,) = remat.profile_regions(body, torch.zeros(3, requires_grad=True)).regions
        assert price.kept_bytes is None or price.kept_bytes >= 0
        assert (price.kept_bytes is None) == (price.note is not None)

    def test_nested_regions_and_scopes(self):
        def outer(t: Tensor) -> Tensor:
            return remat.region(torch.tanh, "inner", recompute=True)(t) @ torch.ones(6, 6)

        def body(x: Tensor) -> Tensor:
            with remat.name_scope("attn"):
                return remat.region(outer, "outer", recompute=True)(x)

        found = by_region(remat.profile_regions(body, torch.zeros(4, 6, requires_grad=True)))
        assert list(found) == ["attn/outer", "attn/inner"]
        assert found["attn/outer"].flops == 2 * 4 * 6 * 6
        assert found["attn/inner"].flops == 0

    def test_collectives_inside_a_region(self):
        import torch.distributed as dist
        from torch.distributed._functional_collectives import all_reduce

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:

            class Reduce(torch.autograd.Function):
                @staticmethod
                def forward(ctx: Any, x: Tensor) -> Tensor:
                    return all_reduce(all_reduce(x, "sum", dist.group.WORLD), "sum", dist.group.WORLD) * 1

                @staticmethod
                def backward(ctx: Any, grad: Tensor) -> Tensor:
                    return grad

            def body(x: Tensor) -> Tensor:
                return remat.region(torch.exp, "none", recompute=True)(
                    remat.region(Reduce.apply, "two", recompute=False)(x)
                )

            report = remat.profile_regions(body, torch.zeros(3, requires_grad=True))
        finally:
            dist.destroy_process_group()
        assert by_region(report)["two"].collectives == (("all_reduce", 2),)
        assert by_region(report)["none"].collectives == ()
        assert "2 all_reduce" in report.format()

    def test_a_rank_of_a_mesh_pays_for_its_own_part(self):
        """Tensor parallel over four: bytes, FLOPs and collectives are those of one rank."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        from torch.testing._internal.distributed.fake_pg import FakeStore

        class FeedForward(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = torch.nn.Linear(16, 64, bias=False), torch.nn.Linear(64, 16, bias=False)

            def forward(self, x: Tensor) -> Tensor:
                hidden = remat.region(self.up, "up", recompute=True)(torch.tanh(x))
                return x + remat.region(self.down, "down", recompute=True)(F.silu(hidden))

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        try:
            block = parallelize_module(
                FeedForward(), init_device_mesh("cpu", (4,)), {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            found = by_region(remat.profile_regions(block, torch.zeros(2, 8, 16)))
        finally:
            dist.destroy_process_group()
        assert (found["up"].kept_bytes, found["down"].kept_bytes) == (4 * 16 * 64 // 4, 0)
        assert {one.flops for one in found.values()} == {2 * 16 * 16 * 64 // 4}
        assert (found["up"].collectives, found["down"].collectives) == ((), (("all_reduce", 1),))

    def test_time_is_that_of_real_data_wherever_it_comes_from(self):
        def price(x: Tensor) -> RegionPrice:
            (one,) = remat.profile_regions(lambda: remat.region(torch.exp, "e", recompute=True)(x).sin()).regions
            return one

        assert price(torch.zeros(3, requires_grad=True)).seconds is not None
        captured = price(torch.zeros(3, requires_grad=True, device="meta"))
        assert (captured.seconds, captured.kept_bytes) == (None, 12)

    def test_a_name_that_does_not_come_again_has_no_price(self):
        calls = Hidden(count=0)

        def body(x: Tensor) -> Tensor:
            calls["count"] += 1
            return remat.region(torch.exp, f"call {calls['count']}", recompute=True)(x)

        (one,) = remat.profile_regions(body, torch.zeros(3, requires_grad=True)).regions
        assert one.kept_bytes is None
        assert one.note == "unknown: the function did not call it again"

    @pytest.mark.parametrize("what", [lambda t: t.sin(), lambda t: None, lambda t: {"loss": t.sin().detach()}])
    @pytest.mark.parametrize("tool", [remat.profile_regions, remat.verify_replay])
    def test_what_needs_no_gradient_is_refused(self, tool: Any, what: Any):
        with pytest.raises(RuntimeError, match="No backward can come through what the function returned"):
            tool(what, torch.zeros(3))


class TestReport:
    def test_the_table_groups_equal_layers(self):
        blocks, data = llama(3)
        lines = remat.profile_regions(lambda x: run(blocks, x), data).format().splitlines()
        head = "checkpoint region now kept if saved time if not FLOPs collectives"
        assert " ".join(lines[0].split()) == head
        assert len(lines) == 6
        assert lines[1].startswith("layers.0-2 (x3)  core    save       1.12 KiB")
        assert lines[5].split()[:3] == ["w2", "save", "0"]

    def test_json(self):
        blocks, data = llama(1)
        data = json.loads(remat.profile_regions(blocks[0], data).to_json())
        assert data["regions"][1]["region"] == "wo"
        assert data["regions"][1]["kept_bytes"] == KEPT["wo"]

    def test_numbers_for_people(self):
        price = RegionPrice("b", "r", "save", 0, 0.25, 1_230_000_000, (), None)
        assert PriceList((price,)).format().splitlines()[1].split()[-4:] == ["ms", "1.23", "G", "-"]

    def test_nothing_is_left_behind_or_learned(self):
        x = torch.zeros(4, 6, requires_grad=True)

        def body(t: Tensor) -> Tensor:
            return remat.region(torch.exp, "e", recompute=False)(torch.sin(t)).sin()

        call = remat.checkpoint(region_name="b")(body)
        expected = torch.autograd.grad(body(x).sum(), x)[0]
        remat.profile_regions(call, x)
        with gc_off():
            before = live_tensors()
            remat.profile_regions(call, x)
            assert live_tensors() == before
        for _ in range(3):
            assert torch.equal(torch.autograd.grad(call(x).sum(), x)[0], expected)

    def test_misuse(self):
        with pytest.raises(TypeError, match="profile_regions expects a function"):
            remat.profile_regions(3)  # type: ignore[arg-type]

    def test_a_bar_on_a_terminal_when_it_takes_long(self, capsys: Any, monkeypatch: pytest.MonkeyPatch):
        clock = iter(range(0, 1000, 3))
        monkeypatch.setattr(prices.time, "monotonic", lambda: float(next(clock)))
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        x = torch.zeros(3, requires_grad=True)
        remat.profile_regions(lambda t: remat.region(torch.exp, "e", recompute=False)(t), x)
        err = capsys.readouterr().err
        assert "profiling regions [" in err
        assert "4/5" in err
        assert err.endswith("\r"), "the bar is taken away"

        def fails(t: Tensor) -> Tensor:
            calls["count"] += 1
            if calls["count"] == 4:
                raise KeyError("mine")
            return remat.region(torch.exp, "e", recompute=False)(t)

        calls = Hidden(count=0)
        with pytest.raises(KeyError):
            remat.profile_regions(fails, x)
        err = capsys.readouterr().err
        assert "profiling regions [" in err
        assert err.endswith("\r"), "also when the function fails"
        monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
        remat.profile_regions(lambda t: remat.region(torch.exp, "e", recompute=False)(t), x)
        assert capsys.readouterr().err == ""
