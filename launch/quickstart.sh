#!/usr/bin/env bash
# Train a small language model with every sequence shared by two ranks, with all set-up: bash launch/quickstart.sh
#
# The model reads bytes, the text is the source code of Python's standard library. About two minutes on two CPU cores.
# Leaves a log (log.jsonl) and the loss curve (loss.png) in runs/quickstart, prints the throughput, and ends with a parity
# check: loss and gradients of one step on both ranks against the same step on one rank. The exit code is 0 only if that
# holds. Further arguments go to launch/train.py, for example: bash launch/quickstart.sh --steps 1000 --data my/folder
# Variables for the set-up (PYTHON, TORCH_SPEC, TORCH_INDEX, VENV, NO_VENV) are described in launch/setup.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

help_if_asked "$@"
setup_environment train
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # the ranks share the cores
OUT="runs/quickstart"

train() { # train RANKS OPTIONS...
    local ranks="$1"
    shift
    set -- launch/train.py --cp "$ranks" --parity-check "$@"
    say "$ranks rank(s): python $*"
    "$PY" -m torch.distributed.run --standalone --nproc-per-node "$ranks" "$@"
}

if [ "$NUM_GPUS" -ge 2 ]; then
    say "training on two of this host's $NUM_GPUS GPUs"
    train 2 --out "$OUT" --backend torch --device cuda --steps 120 "$@"
elif [ "$NUM_GPUS" = 1 ]; then
    say "training on this host's GPU; since a rank needs a GPU of its own, two ranks follow on the CPU, for a few steps"
    train 1 --out "$OUT" --backend torch --device cuda --steps 120 "$@"
    train 2 --out "$OUT-cpu" --device cpu --steps 20
else
    say "training on the CPU, two ranks"
    train 2 --out "$OUT" --device cpu --steps 120 "$@"
fi
say "done: the loss curve is $OUT/loss.png, the log $OUT/log.jsonl"
