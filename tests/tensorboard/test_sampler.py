"""What a rank measures is what the library's reports say at the same moments, and nothing is measured in between."""

import gc
import random
import threading

import pytest
import torch
import torch.nn.functional as F
from boards import DIM, INPUT, TOKENS, WIDE, Block, batch, kept_in, stack
from helpers.bodies import Many, Saves, write_program
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import torch_remat as remat
from torch_remat.runtime import events
from torch_remat_tensorboard.sampler import Sampler


@pytest.fixture
def sampler():
    one = Sampler()
    one.attach()
    yield one
    one.detach()


def test_kept_bytes_are_those_of_the_report_and_of_the_shapes(sampler):
    loss = stack(3)(batch()).sum()
    report = remat.saved_tensors_report(loss)
    loss.backward()
    sample = sampler.take()
    assert sample.kept_bytes == kept_in(report) == 3 * (INPUT + WIDE)
    assert dict(sample.regions) == {"layers.*::up": 3 * WIDE, "layers.*::inputs": 3 * INPUT}


def test_the_next_sample_starts_from_what_is_alive(sampler):
    model = stack(2)
    for _ in range(3):
        model(batch()).sum().backward()
        assert sampler.take().kept_bytes == 2 * (INPUT + WIDE)
    assert sampler.take().kept_bytes == 0
    held = model(batch())
    sampler.take()
    assert sampler.take().kept_bytes == 2 * (INPUT + WIDE)
    del held
    assert sampler.take().kept_bytes == 2 * (INPUT + WIDE)  # it was alive when this sample began
    assert sampler.take().kept_bytes == 0


def test_microbatches_in_flight_add_up_and_those_done_do_not(sampler):
    model, one = stack(1), INPUT + WIDE
    losses = [model(batch()).sum() for _ in range(3)]
    for _ in range(4):  # as in 1F1B: one leaves, one comes
        losses.pop(0).backward()
        losses.append(model(batch()).sum())
    assert sampler.take().kept_bytes == 3 * one


def test_a_forward_that_is_dropped_does_not_count_beside_the_next(sampler):
    model = stack(2)
    for _ in range(3):
        model(batch())
    assert sampler.take().kept_bytes == 2 * (INPUT + WIDE)


def test_an_argument_of_many_blocks_counts_while_a_checkpoint_has_it(sampler):
    def body(t, s):
        return (t * s).sin() * s

    held = []
    for _ in range(3):  # each step has an argument of its own, which its owner does not let go
        held.append(torch.ones(TOKENS, DIM))
        hidden = batch().requires_grad_()
        for index in range(3):
            hidden = remat.checkpoint(region_name=f"b.{index}")(body)(hidden, held[-1])
        expected = kept_in(remat.saved_tensors_report())
        hidden.sum().backward()
        assert sampler.take().kept_bytes == expected == 3 * INPUT
    assert sampler.take().kept_bytes == 0


def test_rebuilt_bytes_are_those_of_the_report_at_the_end_of_replay(sampler):
    found = []

    def ended(tape, error):
        found.append(remat.saved_tensors_report().rebuilt_bytes)

    loss = stack(3)(batch()).sum()
    events.replay_ended.subscribe(ended)
    try:
        loss.backward()
    finally:
        events.replay_ended.unsubscribe(ended)
    sample = sampler.take()
    assert sample.rebuilt_bytes == max(found) >= WIDE
    assert sample.replays == len(found) == 3
    assert 0 < sample.replay_seconds < sample.seconds


def test_two_tapes_rebuilt_at_once_add_up(sampler):
    losses = [Block(index)(batch()).sum() for index in range(2)]
    losses[0].backward()
    single = sampler.take().rebuilt_bytes
    model = stack(1)
    outputs = [model(batch()) for _ in range(2)]
    sampler.take()
    for output in outputs:  # the input half of a split backward leaves what the weight half needs
        torch.autograd.grad(output.sum(), list(model[0].down.parameters()), retain_graph=True)
    assert sampler.take().rebuilt_bytes == 2 * single


def masked(x, mask):
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


@case
def natively_saved_only(x):
    h = x
    for index in range(3):
        h = remat.checkpoint(region_name=f"b.{index}")(lambda t: remat.region(torch.exp, "exp", recompute=False)(t))(h)
    return h


@case
def one_argument_for_all_blocks(x):
    shared = torch.ones(16)
    h = x * 1
    for index in range(3):
        h = remat.checkpoint(region_name=f"b.{index}")(lambda t, s: (t * s).sin() * s)(h, shared)
    return h


@case
def one_mask_for_all_regions(x):
    mask = torch.zeros(32, 32)
    h = x.reshape(1, 1, 32, 16) * 1
    for index in range(3):
        attention = remat.region(masked, "core", recompute=False)
        h = remat.checkpoint(region_name=f"b.{index}")(lambda t, a=attention: a(t.sin(), mask).cos())(h)
    return h


@case
def frozen_weights(x):
    layers = [nn.Linear(16, 16) for _ in range(3)]
    h = (x * 1).requires_grad_()
    for index, layer in enumerate(layers):
        layer.weight.requires_grad_(False)
        h = remat.checkpoint(region_name=f"b.{index}")(
            lambda t, f=layer: remat.region(f, "wide", recompute=False)(t.sin()).cos()
        )(h)
    return h, layers


@case
def packed_by_hooks(x):
    pair = (lambda tensor: (tensor.half(), "low"), lambda payload: payload[0].float())
    with remat.saved_tensors_hooks(*pair):
        return stack(2)(x)


@case
def views_and_names(x):
    def body(t):
        wide = remat.region(lambda s: Saves.apply(s.sin()), "own", recompute=False)(t.exp())
        left, right = remat.region(lambda s: s.unbind(0), "two", recompute=False)(torch.stack([wide, wide]))
        return left.sin() * right

    return remat.checkpoint(region_name="b.0")(body)(x * 1)


@case
def no_region(x):
    return remat.checkpoint(region_name="b.0")(lambda t: t.sin().cos())(x * 1)


@case
def nothing_needs_a_gradient(x):
    with torch.no_grad():
        return stack(2)(x.detach())


@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_keep_counts_as_in_the_report(name, sampler):
    for _ in range(2):  # the first call is observed
        held = CASES[name](batch().requires_grad_())
        report = remat.saved_tensors_report()
        assert sampler._kept.total == kept_in(report), report.format()
        assert sampler._packed.total == sum(size for _, size in report.packed.bytes_by_device)
        by_region: dict[str, int] = {}
        for one in report.checkpoints:
            for region in one.regions:
                by_region[region.name] = by_region.get(region.name, 0) + region.bytes
            by_region["inputs"] = by_region.get("inputs", 0) + sum(row.bytes for row in one.inputs)
        ours: dict[str, int] = {}
        for label, size in sampler._kept.sizes.items():
            region = label.partition("::")[2]
            ours[region] = ours.get(region, 0) + size
        assert {name: size for name, size in ours.items() if size} == {
            name: size for name, size in by_region.items() if size
        }
        del held, report
        sampler.take()


@pytest.mark.parametrize("seed", range(12))
def test_random_bodies_keep_what_the_report_says(seed, sampler):
    rng = random.Random(seed)
    features = {"integers", "containers", "no_grad", "closures", "pass_through", "weights", "complex", "functions"}
    program = write_program(rng, features=frozenset(feature for feature in sorted(features) if rng.random() < 0.5))
    policy = {name: rng.random() < 0.5 for name in program.regions}
    namespace = {
        "torch": torch, "F": F, "remat": remat, "P": policy, "M": dict.fromkeys(program.switches, True), "escaped": [],
        "W": [nn.Parameter(torch.randn(*shape, dtype=torch.float64)) for shape in ((6, 6), (6, 6), (6,))],
        "Saves": Saves, "Many": Many, "nested": lambda name: remat.checkpoint(region_name=name),
    }  # fmt: skip
    exec(compile(program.source, f"<random body {seed}>", "exec"), namespace)
    inputs = [torch.randn(4, 6, dtype=torch.float64, requires_grad=True) * 1 for _ in range(program.inputs)]
    for _ in range(2):
        out = remat.checkpoint(region_name="random")(namespace["body"])(*inputs)
        report = remat.saved_tensors_report()
        assert sampler._kept.total == kept_in(report), f"{report.format()}\n{program.source}"
        del out, report
        gc.collect()
        sampler.take()


def test_offloaded_bytes_are_the_payloads(sampler):
    def body(t):
        return remat.region(torch.exp, "exp", recompute=False)(t.sin()).cos()

    x = batch().requires_grad_()
    remat.checkpoint(
        region_name="b", saved_tensors_hooks=(lambda tensor: tensor.to(torch.bfloat16), lambda data: data.float())
    )(body)(x).sum().backward()
    sample = sampler.take()
    assert sample.offloaded_bytes == 2 * INPUT // 2  # the input and the region's save, in half the width
    assert sample.kept_bytes == 0


def test_replays_in_other_threads_count(sampler):
    losses = [stack(1)(batch()).sum() for _ in range(4)]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sampler.take().replays == 4


def test_a_replay_that_runs_out_of_memory_is_counted_and_passes_on(sampler):
    def body(t):
        if remat.is_recomputing():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return t.sin().cos()

    loss = remat.checkpoint(region_name="b")(body)(batch().requires_grad_()).sum()
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    sample = sampler.take()
    assert (sample.out_of_memory, sample.replays) == (1, 1)
    assert sampler.take().out_of_memory == 0


def test_the_policy_is_seen_not_asked(sampler):
    stack(3)(batch())
    assert sampler.policy == {"save": {"layers.*": {"up"}}, "recompute": {"layers.*": {"down"}}}


def test_the_event_of_a_graph_has_the_nodes_of_the_outputs():
    heard = []
    events.graph_made.subscribe(listener := lambda tape, nodes: heard.append((tape.name, nodes)))
    try:
        x = batch().requires_grad_()
        two = remat.checkpoint(region_name="two")(lambda t: (t.sin(), t.cos(), t, 3))(x)
        remat.checkpoint(region_name="nothing to rebuild")(lambda t: t + 1)(x)
    finally:
        events.graph_made.unsubscribe(listener)
    assert heard == [("two", [two[0].grad_fn, two[1].grad_fn])]


def test_it_holds_nothing(sampler):
    model, x = stack(2), batch()
    hidden = model[0](x)
    out = model[1](hidden)
    alive = [StorageWeakRef(tensor.untyped_storage()) for tensor in (x, hidden, out)]
    gc.disable()
    try:
        out.sum().backward()
        del x, hidden, out
        assert [reference.expired() for reference in alive] == [True] * 3
        assert not sampler._tapes
    finally:
        gc.enable()


def test_nobody_listens_before_and_after():
    def count():
        names = ("graph_made", "output_reached", "replay_started", "replay_ended", "forward_ended", "backward_reached")
        return [len(getattr(events, name).listeners) for name in names]

    before = count()
    one = Sampler()
    assert count() == before
    one.attach()
    assert [now - then for now, then in zip(count(), before, strict=True)] == [1, 1, 1, 1, 0, 0]
    one.detach()
    assert count() == before
