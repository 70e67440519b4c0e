"""Every test here starts without what earlier ones have left to the garbage collector."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _nothing_alive() -> None:
    gc.collect()
