#!/usr/bin/env bash
# One node, all its GPUs (or NGPU of them, or 2 CPU ranks): scripts/titan_one_node.sh <torchtitan's arguments> \
#     --activation_checkpoint.mode remat --activation_checkpoint.save_regions "attention.wo,feed_forward.*"
set -euo pipefail
PYTHON=${PYTHON:-python}
NGPU=${NGPU:-$("$PYTHON" -c 'import torch; print(torch.accelerator.device_count() or 2)')}
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node="$NGPU" \
    --local-ranks-filter="${LOG_RANK:-0}" --role=rank --tee=3 -m torch_remat_titan.train "$@"
