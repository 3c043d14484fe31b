#!/bin/sh
# Run a command again until it ends well:  relaunch.sh python3 train.py CONFIG [key=value ...]
#
# It is not run again after exit codes 2 (wrong input), 3 (a broken invariant, for example a
# ledger that cannot be written) and 130 (stopped by a person), nor after SIGTERM, SIGINT or SIGHUP to
# this script.
# RELAUNCHES: how often it is run again at most (10). PAUSE_S: seconds between two runs (5).
left=${RELAUNCHES:-10}
child= # the command's process, while there is one
early= # the signal that came while there was none
# After SIGTERM the command ends by itself: it writes a checkpoint and audits its ledger.
trap 'left=0; if [ -n "$child" ]; then kill -TERM "$child"; else early=TERM; fi' TERM
trap 'left=0; [ -n "$child" ] || early=TERM' INT # a terminal sends Ctrl-C to the command, too
# A second SIGHUP, of the terminal, does not harm the command; a second SIGTERM would stop it at once.
trap 'left=0; if [ -n "$child" ]; then kill -HUP "$child"; else early=HUP; fi' HUP
trap : PIPE # a closed output does not end this script; the command does not inherit this
while :; do
    "$@" &
    child=$!
    [ -z "$early" ] || kill -"$early" "$child"
    wait "$child"
    code=$?
    while kill -0 "$child" 2>/dev/null; do # a signal to this script ended the wait, not the command
        wait "$child"
        code=$?
    done
    child=
    case $code in 0 | 2 | 3 | 130) exit "$code" ;; esac
    [ "$left" -gt 0 ] || exit "$code"
    left=$((left - 1))
    echo "relaunch.sh: exit code $code; run again in ${PAUSE_S:-5} s, $left more times at most" >&2
    sleep "${PAUSE_S:-5}"
    [ -z "$early" ] || exit "$code"
done
