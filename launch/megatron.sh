#!/usr/bin/env bash
# Train a small GPT of megatron-core, every sequence shared by two ranks, with all set-up: bash launch/megatron.sh
#
# About a minute on two CPU cores. The program is launch/train_megatron.py, which also says what to set in Megatron-LM's
# own programs; further arguments go to it, for example: bash launch/megatron.sh --steps 100 --rows 8
# On a host with several GPUs every one is a rank: RANKS=4 bash launch/megatron.sh --device cuda --backend torch
# (it trains in fp32, for which there are no kernels).
# Variables for the set-up (PYTHON, TORCH_SPEC, TORCH_INDEX, VENV, NO_VENV) are described in launch/setup.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

help_if_asked "$@"
setup_environment megatron
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the ranks share the cores
RANKS="${RANKS:-2}"

set -- launch/train_megatron.py --cp "$RANKS" --device cpu "$@"
say "$RANKS ranks: python $*"
exec "$PY" -m torch.distributed.run --standalone --nproc-per-node "$RANKS" "$@"
