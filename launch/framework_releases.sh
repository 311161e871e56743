#!/usr/bin/env bash
# The plugins' tests against several releases of the frameworks: bash launch/framework_releases.sh [RELEASE...]
#
# RELEASE is NAME==VERSION, or NAME alone for the newest that installs; without any, those of the README's tables:
#   transformers==4.57.6 transformers==5.14.1 transformers megatron-core==0.16.1 megatron-core==0.18.2 megatron-core==0.19.2
# Each gets a virtual environment of its own in .venvs, which is kept; about a minute to install and some minutes to
# test. Nothing here needs a GPU. The exit code is 0 only if everything installed and every test passed.
# Variables for the set-up (PYTHON, TORCH_SPEC, TORCH_INDEX) are described in launch/setup.sh.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"

RELEASES=("$@")
if [ "$#" = 0 ]; then
    RELEASES=(transformers==4.57.6 transformers==5.14.1 transformers)
    RELEASES+=(megatron-core==0.16.1 megatron-core==0.18.2 megatron-core==0.19.2)
fi
for release in "${RELEASES[@]}"; do
    case "${release%%==*}" in
        -h | --help) show_help ;;
        transformers | megatron-core) ;;
        *) die "no tests for '$release'; expected transformers or megatron-core, with ==VERSION or without" ;;
    esac
done

cd "$ROOT" || exit 2
check_python
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CUDA_VISIBLE_DEVICES=""
INDEX=()
if [ -n "${TORCH_INDEX:-}" ]; then INDEX=(--extra-index-url "$TORCH_INDEX"); fi

install_release() { # install_release RELEASE, into $VENV
    local pip=("$VENV/bin/python" -m pip install --quiet --disable-pip-version-check)
    # torch is named wherever something could replace it.
    "${pip[@]}" "${INDEX[@]}" "$TORCH_SPEC" -e . 'pytest>=8' packaging || return 1
    case "$1" in
        # Megatron's newer releases ask for Python 3.12 but bring wheels for 3.11; from 0.18 on they import triton, and
        # all need psutil to write a checkpoint.
        megatron-core*) "${pip[@]}" --ignore-requires-python --no-deps --only-binary :all: "$1" triton psutil ;;
        *) "${pip[@]}" "${INDEX[@]}" "$TORCH_SPEC" "$1" ;;
    esac
}

for release in "${RELEASES[@]}"; do
    VENV="$ROOT/.venvs/$release"
    make_venv
    say "installing $release"
    if ! install_release "$release"; then
        FAILED=1
        SUMMARY+=("FAILED   $release could not be installed (see above)")
        continue
    fi
    name="$("$VENV/bin/python" -m pip list --disable-pip-version-check 2>/dev/null | awk -v n="${release%%==*}" '$1 == n {print $1, $2}')"
    case "$release" in
        transformers*) files=(test_documents.py test_transformers.py test_transformers_on_ranks.py) ;;
        *) files=(test_megatron.py test_megatron_on_ranks.py test_train_megatron.py) ;;
    esac
    step "$name" 1500 "$VENV/bin/python" -m pytest -q -p no:cacheprovider "${files[@]/#/tests/integrations/}"
    SUMMARY+=("         $(tail -n 1 "$LOG")")
    has_passed "$name"
done
say "summary"
printf '   %s\n' "${SUMMARY[@]}"
exit "$FAILED"
