# Sourced by the scripts of this folder, not run by itself: one virtual environment in .venv for all of them.
#
# show_help                 ends the script that was started, after printing the comment that it begins with
# help_if_asked ARGUMENT... the same, if one of these is --help or -h
# setup_environment EXTRA   installs the project with that extra, or does nothing if that was done before and
#                           pyproject.toml is unchanged. Afterwards PY is the interpreter to use, and HAVE_GPU is 1 or 0.
#
# Variables a user may set:
#   PYTHON       interpreter that makes the environment                       (python3)
#   TORCH_SPEC   what to install as torch                                     (torch==2.13.0)
#   TORCH_INDEX  further package index for torch, for instance one of CPU-only builds: without it, and without a CPU
#                wheel in pip's own configuration, pip fetches the CUDA build, which is large but runs on CPU too
#   VENV         folder of the environment                                    (.venv)
#   NO_VENV=1    use PYTHON as it is and install nothing, where an administrator or a container provides everything

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-python3}"
VENV="${VENV:-$ROOT/.venv}"
TORCH_SPEC="${TORCH_SPEC:-torch==2.13.0}"

say() { printf '== %s\n' "$*"; }
die() {
    printf '== error: %s\n' "$*" >&2
    exit 2
}

show_help() {
    awk 'NR == 1 { next } /^#/ { sub(/^# ?/, ""); print; next } { exit }' "$0"
    exit 0
}

help_if_asked() {
    if [[ " $* " = *" --help "* || " $* " = *" -h "* ]]; then show_help; fi
}

find_gpu() {
    HAVE_GPU=0
    NUM_GPUS=0
    if command -v nvidia-smi >/dev/null 2>&1; then
        NUM_GPUS="$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true)"
        if [ "$NUM_GPUS" -gt 0 ]; then HAVE_GPU=1; fi
    fi
}

check_python() {
    command -v "$PYTHON" >/dev/null 2>&1 || die "no '$PYTHON' found; install Python 3.10 or newer, or set PYTHON"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$("$PYTHON" --version) is too old; Python 3.10 or newer is needed (set PYTHON to name another one)"
}

install_venv_module() {
    # Debian ships Python without the parts that make a virtual environment.
    local package
    package="$("$PYTHON" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
        say "this Python cannot make virtual environments; installing $package with apt-get"
        apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$package" >/dev/null &&
            "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null && return
    fi
    die "this Python ($("$PYTHON" --version), $(command -v "$PYTHON")) cannot make a virtual environment: the module" \
        "venv or ensurepip is missing. On Debian or Ubuntu: 'apt-get install $package' as root. Otherwise:" \
        "'pip install virtualenv', or set PYTHON to another Python, or prepare an environment and set NO_VENV=1"
}

make_venv() {
    if [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
    if [ -e "$VENV" ]; then say "the environment in $VENV does not work; making it anew"; else say "making $VENV"; fi
    if ! "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; then
        if "$PYTHON" -m virtualenv --version >/dev/null 2>&1; then
            "$PYTHON" -m virtualenv --quiet --clear "$VENV" || die "virtualenv could not make $VENV"
            return
        fi
        install_venv_module
    fi
    "$PYTHON" -m venv --clear "$VENV" || die "could not make a virtual environment in $VENV (see above)"
}

fingerprint() { # of everything that decides what is installed
    {
        cat "$ROOT/pyproject.toml"
        printf '%s\n' "$ROOT" "$1" "$TORCH_SPEC" "${TORCH_INDEX:-}"
        "$VENV/bin/python" --version
    } | sha256sum | cut -d' ' -f1
}

install_project() {
    local extra="$1" stamp="$VENV/.flashqla-cp-$1" index=()
    if [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint "$extra")" ]; then
        say "$VENV is up to date"
        return
    fi
    rm -f "$stamp"
    if [ -n "${TORCH_INDEX:-}" ]; then index=(--extra-index-url "$TORCH_INDEX"); fi
    say "installing $TORCH_SPEC and the project with [$extra] into $VENV (about a minute; longer with a CUDA build)"
    # torch is named in the same command, so that pip cannot first choose another release and then replace it.
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "${index[@]}" \
        "$TORCH_SPEC" -e "$ROOT[$extra]" || die "pip could not install the project (see above)"
    fingerprint "$extra" >"$stamp"
}

setup_environment() {
    cd "$ROOT"
    find_gpu
    if [ "${NO_VENV:-0}" = 1 ]; then
        check_python
        PY="$(command -v "$PYTHON")"
        export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
        say "NO_VENV=1: using $PY as it is"
    else
        if [ ! -x "$VENV/bin/python" ]; then check_python; fi
        make_venv
        local extra="$1"
        if [ "$HAVE_GPU" = 1 ]; then extra="$1,gpu"; fi
        install_project "$extra"
        PY="$VENV/bin/python"
        export PATH="$VENV/bin:$PATH"
    fi
    "$PY" - "$HAVE_GPU" <<'PYTHON_END' || die "torch does not work in this environment"
import sys

import torch

print(f"== Python {sys.version.split()[0]}, torch {torch.__version__}, {torch.cuda.device_count()} GPU(s) visible to torch")
if sys.argv[1] == "1" and not torch.cuda.is_available():
    print("== warning: this host has a GPU, but this torch build cannot use it; set TORCH_SPEC to a CUDA build")
PYTHON_END
}
