#!/usr/bin/env bash
# A Slurm batch file: one torchrun per node, one process per GPU. Adapt the lines below, then
#
#     sbatch scripts/launch_slurm.sh scripts/train.py --steps 100
#
# The name in `squeue`, and of the log file:
#SBATCH --job-name=torch_remat
# How many machines:
#SBATCH --nodes=2
# One launcher on each; torchrun starts the ranks, not Slurm:
#SBATCH --ntasks-per-node=1
# GPUs of each machine (torchrun finds them by itself):
#SBATCH --gpus-per-node=8
# CPU cores for the launcher and all ranks of a machine; 8-12 for each GPU leave room for data loading:
#SBATCH --cpus-per-task=96
# All memory of the machine:
#SBATCH --mem=0
# No other job on these machines, so that memory and network are this job's own:
#SBATCH --exclusive
# The job is ended after this time (hours:minutes:seconds):
#SBATCH --time=04:00:00
# Output of the launchers; %x is the job's name, %j its number:
#SBATCH --output=%x-%j.log
# Partition, account and quality of service are names of your cluster: add `#SBATCH --partition=...` where it asks.
set -euo pipefail

if [[ $# -eq 0 ]]; then
    echo "usage: sbatch [SLURM OPTIONS] $0 SCRIPT [ARGUMENTS]" >&2
    exit 2
fi

# The first node of the allocation is where the ranks meet.
RDZV_HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
RDZV_HOST=${RDZV_HOST%%$'\n'*}
export RDZV_HOST

# Jobs that share a node must not share a port: derive it from the job's number.
export RDZV_PORT=$((20000 + SLURM_JOB_ID % 20000))
export JOB_ID=$SLURM_JOB_ID
export NODES=$SLURM_JOB_NUM_NODES
export GPUS=${SLURM_GPUS_ON_NODE:-gpu}

# Logs of each rank, by job. On a file system that all nodes see.
export LOG_DIR=${LOG_DIR:-logs/$SLURM_JOB_ID}

# Slurm copies this file before it runs it, so the launcher is found from where the job was submitted.
cd "${SLURM_SUBMIT_DIR:-.}"

# --kill-on-bad-exit: when the launcher of one node fails, those of the others end, too.
srun --kill-on-bad-exit=1 scripts/launch_torchrun.sh "$@"
