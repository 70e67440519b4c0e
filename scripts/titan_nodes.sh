#!/usr/bin/env bash
# Several nodes: run this on each, with the same HEAD (host name or address of one of them) and JOB (any text):
#   HEAD=node0 NODES=4 JOB=run1 scripts/titan_nodes.sh <torchtitan's arguments> --activation_checkpoint.mode remat ...
set -euo pipefail
PYTHON=${PYTHON:-python}
: "${HEAD:?set HEAD to the host name of one node}" "${NODES:?set NODES to the number of nodes}"
NGPU=${NGPU:-$("$PYTHON" -c 'import torch; print(torch.accelerator.device_count() or 2)')}
exec "$PYTHON" -m torch.distributed.run --nnodes="$NODES" --nproc-per-node="$NGPU" \
    --rdzv-backend=c10d --rdzv-endpoint="$HEAD:${PORT:-29500}" --rdzv-id="${JOB:-torch_remat}" \
    --local-ranks-filter="${LOG_RANK:-0}" --role=rank --tee=3 -m torch_remat_titan.train "$@"
