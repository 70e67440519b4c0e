"""A sample has one size, and comes out of its bytes as it went in."""

import json

import pytest
from boards import batch, stack

from torch_remat_tensorboard.names import group_of, label_of
from torch_remat_tensorboard.sample import OTHERS, ROWS, SAMPLE_BYTES, Sample, largest_rows
from torch_remat_tensorboard.sampler import Sampler

FULL = Sample(
    rank=4095,
    stage=7,
    seconds=1.25,
    kept_bytes=3 << 40,
    rebuilt_bytes=1,
    offloaded_bytes=2,
    allocated_bytes=3,
    reserved_bytes=4,
    resident_bytes=5,
    capacity_bytes=141 << 30,
    replay_seconds=0.5,
    replays=96,
    retries=6,
    out_of_memory=7,
    regions=(("layers.*::attention.inner_attention", 2 << 40), ("layers.*::inputs", 1 << 40)),
)


@pytest.mark.parametrize("sample", [FULL, Sample()], ids=["full", "empty"])
def test_a_sample_comes_back(sample):
    assert Sample.unpack(sample.pack()) == sample
    assert Sample.of(json.loads(sample.to_json())) == sample


@pytest.mark.parametrize("depth", [1, 2, 40])
def test_the_size_does_not_depend_on_the_depth(depth):
    sampler = Sampler()
    sampler.attach()
    try:
        stack(depth)(batch()).sum().backward()
    finally:
        sampler.detach()
    sample = sampler.take()
    assert len(sample.pack()) == SAMPLE_BYTES
    assert [label for label, _ in sample.regions] == ["layers.*::up", "layers.*::inputs"]


def test_the_size_does_not_depend_on_the_regions():
    sizes = {f"layers.*::{index}": 100 + index for index in range(40)}
    rows = largest_rows(sizes)
    assert len(rows) == ROWS
    assert rows[0] == ("layers.*::39", 139)
    assert rows[-1][0] == OTHERS
    assert sum(size for _, size in rows) == sum(sizes.values())
    sample = Sample(regions=rows)
    assert len(sample.pack()) == SAMPLE_BYTES
    assert Sample.unpack(sample.pack()) == sample


def test_regions_that_fit_all_have_a_row():
    sizes = {f"r{index:02d}": 5 for index in range(ROWS)}
    assert largest_rows(sizes) == tuple(sizes.items())
    assert largest_rows({"a": 0, "b": 1}) == (("b", 1),)


def test_long_labels_keep_both_ends():
    label = "vision_encoder.transformer.layers.*::" + "very_long_module_name." * 4 + "proj_ü"
    (short, size), *_ = Sample.unpack(Sample(regions=((label, 9),)).pack()).regions
    assert size == 9
    assert len(short.encode()) <= 56
    assert short.startswith("vision_encoder.")
    assert short.endswith("proj_ü")
    assert "…" in short
    umlauts = "ü" * 60
    assert set(Sample.unpack(Sample(regions=((umlauts, 9),)).pack()).regions[0][0]) == {"ü", "…"}


@pytest.mark.parametrize(
    ("checkpoint", "region", "label"),
    [
        ("layers.31", "attention.wo", "layers.*::attention.wo"),
        ("layers.3", "feed_forward.w13", "layers.*::feed_forward.w13"),
        ("stage1.block2", "experts.7.w1", "stage*.block*::experts.*.w1"),
        (None, "w2", "<unnamed>::w2"),
    ],
)
def test_blocks_of_one_kind_are_one_group(checkpoint, region, label):
    assert label_of(checkpoint, region) == label
    assert label.startswith(group_of(checkpoint))
