#!/usr/bin/env bash
# Run a command that installs something. Its output goes to the end of a log; the terminal gets one
# line, and the command's output only if the command fails:
#
#     tools/installing.sh WHAT LOG COMMAND...
#
# Its seconds are appended to the file $INSTALL_SECONDS, if that is set.
set -uo pipefail
what=$1 log=$2
shift 2
mkdir -p "$(dirname "$log")"
echo "installing $what (log: $log)"
begin=$(($(wc -c 2>/dev/null <"$log" || echo 0) + 1))
"$@" >>"$log" 2>&1 </dev/null
status=$?
echo "$SECONDS" >>"${INSTALL_SECONDS:-/dev/null}"
[ "$status" = 0 ] && exit
tail -c "+$begin" "$log" >&2
echo "error: installing $what failed with code $status: $*; the output above is also in $log" >&2
exit "$status"
