#!/usr/bin/env bash
#SBATCH --job-name=torch_remat
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
# Slurm: sbatch --nodes=4 scripts/titan_slurm.sh <torchtitan's arguments> --activation_checkpoint.mode remat ...
set -euo pipefail
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD NODES="$SLURM_JOB_NUM_NODES" JOB="$SLURM_JOB_ID" NGPU="${SLURM_GPUS_ON_NODE:-8}"
exec srun "${SLURM_SUBMIT_DIR:?}/scripts/titan_nodes.sh" "$@"
