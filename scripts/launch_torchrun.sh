#!/usr/bin/env bash
# Start a training script on this node of a cluster. Run the same command on every node, in any order:
#
#     NODES=4 GPUS=8 RDZV_HOST=node0 scripts/launch_torchrun.sh scripts/train.py --steps 100
#
# Each variable can be set in the environment; what follows `launch_torchrun.sh` is the script and its arguments.
set -euo pipefail

# How many machines take part. With "2:4" the job starts with two and takes up to four (torchrun restarts it then).
NODES=${NODES:-1}

# Processes on this machine: one per GPU. "gpu" counts the GPUs, "cpu" the cores; a number is taken as it is.
GPUS=${GPUS:-gpu}

# The machine where the ranks meet: a host name or address that all others reach. Any one of the nodes will do.
RDZV_HOST=${RDZV_HOST:-localhost}

# A free port on that machine; open it in the firewall between the nodes.
RDZV_PORT=${RDZV_PORT:-29500}

# Distinguishes jobs that meet at the same host and port. Every node of one job must have the same value.
JOB_ID=${JOB_ID:-torch_remat}

# How often all ranks are started again after one has failed. 0: the job ends with the first failure, and its error is
# that of the rank which failed first.
RESTARTS=${RESTARTS:-0}

# Where each rank writes stdout and stderr: <LOG_DIR>/<run>/attempt_0/<rank>/{stdout,stderr}.log. Empty: the terminal.
LOG_DIR=${LOG_DIR:-}

# Threads of each process on the CPU. torchrun's own default is 1, too; more only helps CPU-heavy data loading.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# NCCL ends a collective that a rank does not join after the process group's timeout, with an error instead of a hang.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}

# On clusters with several networks name the interface between the nodes, for gloo and NCCL: eth0, ib0, ...
if [[ -n "${NET_INTERFACE:-}" ]]; then
    export NCCL_SOCKET_IFNAME=$NET_INTERFACE GLOO_SOCKET_IFNAME=$NET_INTERFACE
fi

# 1: ranks compare their policies in the first step (the default). 0: they do not.
export TORCH_REMAT_RANK_CHECK=${TORCH_REMAT_RANK_CHECK:-1}

if [[ $# -eq 0 ]]; then
    echo "usage: NODES=... GPUS=... RDZV_HOST=... $0 SCRIPT [ARGUMENTS]" >&2
    exit 2
fi

logs=()
if [[ -n "$LOG_DIR" ]]; then
    logs=(--log-dir "$LOG_DIR" --redirects 3)
fi

exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$NODES" \
    --nproc-per-node "$GPUS" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$RDZV_HOST:$RDZV_PORT" \
    --rdzv-id "$JOB_ID" \
    --max-restarts "$RESTARTS" \
    "${logs[@]}" \
    "$@"
