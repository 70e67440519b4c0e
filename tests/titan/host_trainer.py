"""torchtitan's own launcher, on CPU ranks where there is no accelerator, with rows of its metrics.

Started by torchrun as a script: `host_trainer.py <the host's arguments>`.
"""

import runpy

from torch_remat_titan.cpu import prepare_cpu_host
from torch_remat_titan.rows import write_rows_if_asked

prepare_cpu_host()
write_rows_if_asked()
runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
