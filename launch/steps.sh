# Sourced by test.sh and multi_gpu_check.sh, not run by itself: steps with a time limit each, and a summary of them.
#
# step NAME SECONDS COMMAND...   runs the command; its output is shown and kept in $LOG until the next step
# skip NAME REASON...            notes that a step was left out
# Afterwards FAILED is 1 if a step failed, else 0, and SUMMARY has a line for each. say and die come from setup.sh.

SUMMARY=()
FAILED=0
WORK="$(mktemp -d)" # of the running step: its process, its exit code, its output
LOG="$WORK/log"
trap 'rm -rf "$WORK"' EXIT
trap 'stop_step; exit 130' INT TERM HUP

stop_step() { # timeout leads a process group of its own, which a signal to this script does not reach
    if [ -s "$WORK/pid" ]; then kill -TERM "$(cat "$WORK/pid")" 2>/dev/null && wait; fi
}

step() {
    local name="$1" limit="$2" start=$SECONDS code
    shift 2
    say "$name (limit $limit s): $*"
    {
        timeout --kill-after=20 "$limit" "$@" </dev/null &
        echo $! >"$WORK/pid"
        wait $!
        echo $? >"$WORK/code"
    } 2>&1 | tee "$LOG" &
    wait $!
    rm -f "$WORK/pid"
    code="$(cat "$WORK/code")"
    if [ "$code" = 0 ]; then
        SUMMARY+=("ok       $name, $((SECONDS - start)) s")
    else
        FAILED=1
        if [ "$code" = 124 ] || [ "$code" = 137 ]; then code="$code: time limit of $limit s"; fi
        SUMMARY+=("FAILED   $name, $((SECONDS - start)) s, exit code $code")
    fi
}

skip() {
    local name="$1"
    shift
    say "$name skipped: $*"
    SUMMARY+=("skipped  $name: $*")
}

has_passed() { # a test step in which nothing passed has tested nothing
    if ! grep -qE '[0-9]+ passed' "$LOG"; then
        FAILED=1
        SUMMARY+=("FAILED   $1 ran no test")
    fi
}

mpi_flags() { # what Open MPI needs to start ranks as root and more of them than cores
    if "$MPIRUN" --version 2>&1 | grep -q 'Open MPI'; then printf '%s\n' --allow-run-as-root --oversubscribe; fi
}
