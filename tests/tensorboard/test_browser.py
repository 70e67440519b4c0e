"""A real TensorBoard server and a real browser: what two ranks have written is what a person sees."""

import sys
from pathlib import Path

import boards_on_ranks
import pytest
from helpers.ranks import run_ranks, values
from PIL import Image

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import dashboard_screenshots as shots  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shots.browser() is None, reason=f"needs a browser: none of {', '.join(shots.BROWSERS)} here"),
]

COLOURS = {"rank_0": (0, 119, 187), "rank_1": (204, 51, 17), "all_ranks": (255, 112, 67)}
"""In which TensorBoard draws its first runs, in the order of their names: all_ranks, rank_0, rank_1."""

HEADER, SIDE = 70, 365
"""Pixels of the page above and left of what it shows."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("board") / "two_ranks"
    values(run_ranks(boards_on_ranks.train, 2, folder, (1, 3), 8))
    with shots.tensorboard(folder) as address:
        assert address.startswith("http://127.0.0.1:")
        yield address


def pixels(path, colour, tolerance=6, box=None):
    """How many pixels of the page's content, or of a box, have about this colour."""
    with Image.open(path) as image:
        data = image.convert("RGB").crop(box or (SIDE, HEADER, *image.size)).tobytes()
    return sum(
        all(abs(data[at + part] - colour[part]) <= tolerance for part in range(3)) for at in range(0, len(data), 3)
    )


def test_custom_scalars_show_a_line_for_each_rank(server, tmp_path):
    path = tmp_path / "ranks.png"
    shots.screenshot(f"{server}#custom_scalars&_smoothingWeight=0", path, (1400, 700))
    first_chart = (SIDE, 150, 720, 360)  # what checkpoints keep
    for run in ("rank_0", "rank_1"):
        assert pixels(path, COLOURS[run], box=first_chart) > 80, run
    assert pixels(path, COLOURS["all_ranks"], box=first_chart) == 0


def test_the_picture_of_ranks_and_regions_is_shown(server, tmp_path):
    from torch_remat_tensorboard.heatmap import _DARK

    path = tmp_path / "regions.png"
    shots.screenshot(f"{server}#images", path, (1400, 700))
    assert pixels(path, _DARK) > 200  # the largest region of the worst rank
    with Image.open(path) as image:
        assert image.size == (1400, 700)


def test_a_page_that_cannot_be_opened_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(shots, "browser", lambda: None)
    with pytest.raises(RuntimeError, match="To fix: apt-get install chromium"):
        shots.screenshot("http://127.0.0.1:1/", tmp_path / "none.png", (100, 100))
