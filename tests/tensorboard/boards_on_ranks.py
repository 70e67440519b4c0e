"""What one of several ranks does under a dashboard; run by the tests, in processes of their own."""

import os
import signal

import torch
import torch.distributed as dist
from boards import DIM, TOKENS, Block, batch, kept_in, stack
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import Schedule1F1B

import torch_remat as remat
from torch_remat_tensorboard import MemoryDashboard


def train(rank, folder, depths, steps=3):
    """Blocks of its own on each rank; returns what the reports of this rank say of each step."""
    kept = []
    model = stack(depths[rank])
    with MemoryDashboard(folder, hparams={"depth": 3}) as dashboard:
        for _ in range(steps):
            loss = model(batch()).sum()
            kept.append(kept_in(remat.saved_tensors_report(loss)))
            loss.backward()
            dashboard.step()
    return kept


def pipeline(rank, folder, microbatches=6):
    """1F1B over two stages: the first has two microbatches in flight, the last one."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    torch.manual_seed(0)
    module = nn.Sequential(Block(2 * rank), Block(2 * rank + 1))
    with MemoryDashboard(folder, mesh=mesh) as dashboard:
        for _ in range(2):
            stage = PipelineStage(module, rank, 2, torch.device("cpu"))
            schedule = Schedule1F1B(
                stage, microbatches, loss_fn=lambda output, target: (output - target).square().sum()
            )
            x = torch.randn(microbatches * TOKENS, DIM)
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=x)
            dashboard.step()


def other_writer(rank, folder):
    """The second rank writes."""
    with MemoryDashboard(folder, writer_rank=1) as dashboard:
        batch()
        dashboard.step()
        return os.path.isdir(folder), dashboard._writer is not None


def late(rank, folder):
    """As where only a device sends: what is sent is read one call later, and the last at the end."""
    from torch_remat_tensorboard import gather

    class Arrived:
        def query(self):
            return True

        def synchronize(self):
            pass

    class Late(gather.Gather):
        def exchange(self, step, sample, *, read=True):
            now = super().exchange(step, sample, read=read)
            before = self.drain(wait=True)
            if now:
                data = torch.frombuffer(bytearray(b"".join(one.pack() for one in now[0].samples)), dtype=torch.uint8)
                self._pending = gather._Sent(step, now[0].time, data, Arrived())
            return before

    import torch_remat_tensorboard.dashboard as module

    module.Gather = Late
    found = []
    with MemoryDashboard(folder) as dashboard:
        for _ in range(3):
            dashboard.step()
            dist.barrier()
            found.append(len(os.listdir(folder)) > 0)
    return found


def killed(folder):
    """Started twice by the test, with RANK 0 and 1: the second is killed in its fourth step."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = stack(2)
    with MemoryDashboard(folder) as dashboard:
        for step in range(1, 10):
            loss = model(batch()).sum()
            if rank == 1 and step == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            dashboard.step()
