"""One process group per file, over NCCL where every rank has a GPU, else over gloo."""

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@pytest.fixture(scope="session")
def device() -> Iterator[torch.device]:
    """This rank's device, with the process group set up around the tests."""
    if not dist.is_torchelastic_launched():
        pytest.exit("these tests run under torchrun; use `python multi_gpu_tests/run.py`", returncode=2)
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= ranks
    here = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(here)
    # A collective that a rank never joins fails well before the runner's time limit, with a traceback in the log.
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=60))
    yield here
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def mesh(device: torch.device) -> DeviceMesh:
    """All ranks in one dimension."""
    return init_device_mesh(device.type, (dist.get_world_size(),))
