"""What is read of an accelerator and of a host. There is no accelerator here: its counters and events are stand-ins."""

import os
import time
from pathlib import Path

import pytest
import torch

import torch_remat as remat
from torch_remat_tensorboard import device as module
from torch_remat_tensorboard.device import Device, DeviceTimer, HostTimer
from torch_remat_tensorboard.sampler import Sampler


class Event:
    """An event of a stream: `done` when the device has come so far; `now` is the device's clock in milliseconds."""

    now = 0.0
    done = True

    def record(self):
        self.at = Event.now

    def query(self):
        return Event.done

    def elapsed_time(self, other):
        return other.at - self.at


@pytest.fixture
def accelerator(monkeypatch):
    """Stand-ins for the counters of an accelerator; a test sets them."""
    stats = {
        "allocated_bytes.all.peak": 30,
        "reserved_bytes.all.current": 50,
        "num_alloc_retries": 2,
        "num_ooms": 1,
    }
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: stats)
    monkeypatch.setattr(module, "current_accelerator", lambda: torch.device("cuda", 3))
    monkeypatch.setattr(Device, "capacity_bytes", lambda self: 1000)
    monkeypatch.setattr(Device, "_make_event", lambda self: Event())
    Event.now, Event.done = 0.0, True
    return stats


def test_an_accelerator_gives_peak_reserved_and_what_went_wrong_since_the_last_sample(accelerator):
    sampler = Sampler()
    accelerator.update({"num_alloc_retries": 5, "num_ooms": 2})
    sample = sampler.take()
    assert (sample.allocated_bytes, sample.reserved_bytes, sample.capacity_bytes) == (30, 50, 1000)
    assert (sample.retries, sample.out_of_memory, sample.resident_bytes) == (3, 1, None)
    assert (sampler.take().retries, sampler.take().out_of_memory) == (0, 0)


def test_a_peak_that_the_loop_resets_before_the_step_ends_counts(accelerator):
    sampler = Sampler()
    accelerator["allocated_bytes.all.peak"] = 70
    sampler.note_peak()
    accelerator["allocated_bytes.all.peak"] = 20
    assert sampler.take().allocated_bytes == 70
    assert sampler.take().allocated_bytes == 20


def test_replays_are_timed_by_the_device_and_nobody_waits_for_it(accelerator):
    def body(t):
        Event.now += 250.0
        return t.sin().cos()

    sampler = Sampler()
    sampler.attach()
    try:
        Event.done = False
        remat.checkpoint(region_name="b")(body)(torch.ones(4, requires_grad=True)).sum().backward()
        early = sampler.take()
        Event.done = True
        later = sampler.take()
    finally:
        sampler.detach()
    assert (early.replays, early.replay_seconds) == (1, 0.0)
    assert (later.replays, later.replay_seconds) == (0, 0.25)


def test_what_is_recorded_into_a_graph_of_the_device_has_no_time():
    timer = DeviceTimer(lambda: None)
    timer.end(timer.start())
    assert timer.take() == 0.0


def test_the_host_times_itself():
    timer = HostTimer()
    for _ in range(2):
        started = timer.start()
        time.sleep(0.01)
        timer.end(started)
    assert 0.02 <= timer.take() < 1
    assert timer.take() == 0.0


def test_the_capacity_of_a_host_is_the_machine_or_the_limit_of_its_container(monkeypatch, tmp_path):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(module, "_LIMITS", (str(tmp_path / "missing"), str(limit)))
    assert Device().capacity_bytes() == machine
    for text, expected in (("max\n", machine), (f"{1 << 20}\n", 1 << 20), (f"{1 << 62}\n", machine)):
        limit.write_text(text)
        assert Device().capacity_bytes() == expected


def test_the_resident_set_is_that_of_this_process():
    reading = Device().read()
    held = torch.ones(8 << 20, dtype=torch.float32)
    grown = Device().read()
    assert grown.resident_bytes - reading.resident_bytes > held.nbytes / 2
    status = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]
    assert abs(int(status) * 1024 - grown.resident_bytes) < 16 << 20
