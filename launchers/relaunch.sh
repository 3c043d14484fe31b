#!/bin/sh
# Run a command again until it ends well:  relaunch.sh python3 train.py CONFIG [key=value ...]
#
# It is not run again after exit codes 2 (wrong input), 3 (a broken promise, such as a ledger that
# cannot be written) and 130 (stopped by a person), nor after SIGTERM or SIGINT to this script.
# RELAUNCHES: how often it is run again at most (10). PAUSE_S: seconds between two runs (5).
left=${RELAUNCHES:-10}
trap 'left=0; kill -TERM "$child"' TERM # the command ends by itself: a checkpoint, then the audit
trap 'left=0' INT                       # a terminal sends Ctrl-C to the command, too
while :; do
    "$@" &
    child=$!
    wait "$child"
    code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal to this script ended the wait, not the command
        wait "$child"
        code=$?
    done
    case $code in 0 | 2 | 3 | 130) exit "$code" ;; esac
    [ "$left" -gt 0 ] || exit "$code"
    left=$((left - 1))
    echo "relaunch.sh: exit code $code; run again in ${PAUSE_S:-5} s, $left more times at most" >&2
    sleep "${PAUSE_S:-5}"
done
