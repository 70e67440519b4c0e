"""Lines, charts, picture and text of few ranks, of stages and of thousands."""

import io
import re

import pytest
from boards import GIB
from PIL import Image

from torch_remat_tensorboard.heatmap import _CELL_HEIGHT, _CELL_WIDTH, _GAP, columns_of, heatmap, rows_of
from torch_remat_tensorboard.layout import layout_for
from torch_remat_tensorboard.report import step_report
from torch_remat_tensorboard.sample import Sample
from torch_remat_tensorboard.series import MEMORY, REPLAY, TROUBLE, scalars, worst_first


def gpu(rank, allocated, stage=None, **more):
    return Sample(
        rank=rank,
        stage=stage,
        seconds=2.0,
        replay_seconds=0.5,
        kept_bytes=(rank + 1) * GIB,
        allocated_bytes=allocated * GIB,
        reserved_bytes=(allocated + 1) * GIB,
        capacity_bytes=80 * GIB,
        regions=(("layers.*::attention.wo", rank * GIB), ("layers.*::inputs", GIB)),
        **more,
    )


def host(rank, kept, resident):
    return Sample(
        rank=rank, kept_bytes=kept, resident_bytes=resident, capacity_bytes=100, regions=(("b::inputs", kept),)
    )


def patterns(layout):
    found = {}
    for category in layout.category:
        for chart in category.chart:
            tags = list(chart.multiline.tag)
            for series in chart.margin.series:
                tags += [series.value, series.lower, series.upper]
            found[category.title, chart.title] = tags
    return found


def test_every_rank_is_a_run_with_lines_in_gib_and_percent():
    points = scalars([gpu(0, 20), gpu(1, 40)])
    assert list(points) == ["all_ranks", "rank_0", "rank_1"]
    assert points["rank_1"]["remat/allocated_gib"] == 40
    assert points["rank_1"]["remat/allocated_percent"] == 50
    assert points["rank_0"]["remat/kept_gib"] == 1
    assert points["rank_0"]["remat/replay_percent"] == 25
    everyone = points["all_ranks"]
    assert (everyone["remat/allocated_gib/min"], everyone["remat/allocated_gib/mean"]) == (20, 30)
    assert everyone["remat/allocated_gib/max"] == 40
    assert everyone["remat/worst_rank"] == 1
    assert everyone["remat/region_gib/layers.*::inputs"] == 1
    assert not any("resident" in tag for line in points.values() for tag in line)
    assert list(scalars([gpu(rank, 1) for rank in range(11)]))[1:3] == ["rank_00", "rank_01"]


def test_the_worst_rank_is_nearest_to_its_capacity_or_keeps_most():
    assert [sample.rank for sample in worst_first([gpu(0, 30), gpu(1, 70), gpu(2, 30)])] == [1, 0, 2]
    assert [sample.rank for sample in worst_first([host(0, 10, 50), host(1, 20, 5)])] == [1, 0]


def test_stages_have_the_worst_of_their_ranks():
    samples = [gpu(rank, 10 * (rank + 1), stage=rank // 2) for rank in range(4)]
    points = scalars(samples)
    assert points["stage_0"]["remat/stage/allocated_gib"] == 20
    assert points["stage_1"]["remat/stage/allocated_gib"] == 40
    titles = {category for category, _ in patterns(layout_for(samples))}
    assert "Memory, worst rank of each stage" in titles
    assert "(stage 1)" in step_report(3, samples)


@pytest.mark.parametrize("ranks", [33, 4096])
def test_many_ranks_are_the_worst_four_and_a_band(ranks):
    samples = [gpu(rank, rank % 60, stage=rank % 8) for rank in range(ranks)]
    points = scalars(samples)
    assert list(points) == ["all_ranks", *(f"worst_{i}" for i in (1, 2, 3, 4)), *(f"stage_{i}" for i in range(8))]
    largest = sorted((sample.allocated_bytes / GIB for sample in samples), reverse=True)[:4]
    assert [points[f"worst_{place}"]["remat/allocated_gib"] for place in (1, 2, 3, 4)] == largest
    assert sum(map(len, points.values())) < 300  # whatever the number of ranks
    assert len(rows_of(samples)) == 32
    text = step_report(1, samples)
    worst = worst_first(samples)[0].rank
    assert f"rank {worst} (stage {worst % 8}) is the worst of {ranks}" in text
    assert "Worst ranks: " in text
    assert heatmap(samples)[1][1] < 1200


def test_the_layout_has_every_line_and_only_lines_that_exist():
    for samples in (
        [gpu(0, 1)],
        [gpu(0, 1), gpu(1, 2)],
        [gpu(rank, 1, stage=rank % 2) for rank in range(40)],
        [host(0, 1, 2)],
    ):
        tags = {tag for line in scalars(samples).values() for tag in line}
        shown = set()
        for title, wanted in patterns(layout_for(samples)).items():
            for pattern in wanted:
                matched = {tag for tag in tags if re.match(pattern, tag)}
                assert matched, (title, pattern)
                shown |= matched
        assert shown == tags


def test_all_ranks_are_in_one_chart():
    charts = patterns(layout_for([gpu(rank, 1) for rank in range(3)]))
    assert charts["Memory, all ranks", "Kept by checkpoints after forward, GiB"] == ["^remat/kept_gib$"]
    band = charts["Memory, smallest, mean and largest", "Kept by checkpoints after forward, % of capacity"]
    assert band == [f"remat/kept_percent/{name}" for name in ("mean", "min", "max")]


def test_metric_names_end_in_their_units():
    assert all(metric.name.endswith(("_gib", "_percent")) for metric in MEMORY)
    assert [metric.name for metric in REPLAY + TROUBLE] == [
        "replay_ms", "replay_percent", "replays", "step_ms", "retries", "out_of_memory",
    ]  # fmt: skip


def test_the_picture_has_a_row_per_rank_and_darker_cells_for_more():
    samples = [gpu(0, 1), gpu(1, 1), gpu(4, 1)]
    png, size = heatmap(samples)
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG"
    assert image.size == size
    columns = columns_of(samples)
    assert columns == ["layers.*::attention.wo", "layers.*::inputs"]
    width, height = size
    corners = [
        image.getpixel((width - 2 * _CELL_WIDTH - 2, height - _GAP - _CELL_HEIGHT * (3 - row) + 2)) for row in range(3)
    ]
    brightness = [sum(pixel) for pixel in corners]
    assert brightness[0] > brightness[1] > brightness[2]


def test_a_picture_of_nothing_kept_can_be_drawn():
    png, size = heatmap([Sample()])
    assert Image.open(io.BytesIO(png)).size == size


def test_the_text_names_the_worst_rank_and_its_largest_regions():
    assert step_report(7, [gpu(0, 20, replays=4, retries=2), gpu(1, 10)]).splitlines() == [
        "**Step 7: rank 0 is the worst of 2**",
        "",
        "| rank 0 | bytes | of capacity |",
        "|---|---:|---:|",
        "| kept by checkpoints after forward | 1.00 GiB | 1.2 % |",
        "| rebuilt at the peak of replay | 0 B | 0.0 % |",
        "| packed by hooks, offloaded | 0 B | 0.0 % |",
        "| allocated on the device, peak | 20.00 GiB | 25.0 % |",
        "| reserved by the allocator | 21.00 GiB | 26.2 % |",
        "| capacity | 80.00 GiB | 100.0 % |",
        "",
        "4 replays took 500.0 ms of 2000.0 ms; 2 allocator retries, 0 out-of-memory events.",
        "",
        "| largest regions | kept | of what it keeps |",
        "|---|---:|---:|",
        "| `layers.*::attention.wo` | 0 B | 0.0 % |",
        "| `layers.*::inputs` | 1.00 GiB | 100.0 % |",
    ]
