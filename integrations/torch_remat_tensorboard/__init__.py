"""Memory of every rank in TensorBoard: `MemoryDashboard`.

| module | what it holds |
|---|---|
| `dashboard` | `MemoryDashboard` |
| `sampler` | what one rank measures |
| `kept`, `resident` | what checkpoints keep, while it is alive |
| `device` | allocator, resident set, capacity, clocks |
| `sample` | the figures of one rank and step, and their form of fixed size |
| `names` | labels of block groups and regions |
| `gather` | the one all-gather of a step |
| `series` | from samples to the lines of the charts; which rank is the worst |
| `layout`, `heatmap`, `report` | charts, picture and text |
| `event_file`, `recording` | the files |
| `writer` | puts them together, and takes a full disk calmly |
"""

from torch_remat_tensorboard.dashboard import MemoryDashboard

__all__ = ["MemoryDashboard"]
