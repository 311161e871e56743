#!/usr/bin/env bash
# Training on the GPUs of one node (CPU ranks where there is none), with torchrun:
#
#   bash launch/single_node.sh --cp 8 --seq-len 262144            every sequence on eight ranks
#   bash launch/single_node.sh --cp 4 --batch-size 8              two data-parallel groups of four
#   PROGRAM=launch/train_deepspeed.py bash launch/single_node.sh --sp 8
#
# All options go to the program, which lists them: python launch/train.py --help
# --cp, or --sp with DeepSpeed, must divide the number of ranks.
#   PROGRAM   launch/train.py (the default) or launch/train_deepspeed.py
#   RANKS     processes to start: the number of GPUs, or 2 without any
#
# What to set, and why:
#   --layout     contiguous: one range for each rank and the fewest messages. zigzag only where other layers of a model,
#                such as ring attention, need it. With Ulysses contiguous is the only choice.
#   gradients    are summed over the ranks of a sequence, never averaged; launch/train.py does so itself (ranks.py), and
#                with DeepSpeed ZeRO does, after scale_loss has undone its averages.
#   loss         each rank divides the sum over its tokens by the number of targets of all ranks (step.py): shards may
#                hold different numbers of them, so a mean of means would be another loss.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$ROOT"

help_if_asked "$@"
find_gpu
ranks="${RANKS:-$((NUM_GPUS > 0 ? NUM_GPUS : 2))}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # ranks share the cores

# torchrun would bury the program's own word on this under its report of every rank.
option=""
for argument in "$@" ""; do
    value=""
    case "$option" in --cp | --sp) value="$argument" ;; esac
    case "$argument" in --cp=* | --sp=*) option="${argument%%=*}" value="${argument#*=}" ;; esac
    if [[ "$value" =~ ^[1-9][0-9]*$ ]] && ((ranks % value)); then
        die "$option $value does not divide the $ranks ranks; choose another, or set RANKS, the processes to start"
    fi
    option="$argument"
done

if [ "$#" = 0 ]; then set -- "$([[ "${PROGRAM:-}" = *deepspeed* ]] && echo --sp || echo --cp)" "$ranks"; fi
exec torchrun --standalone --nproc-per-node "$ranks" "${PROGRAM:-launch/train.py}" "$@"
