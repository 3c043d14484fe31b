#!/usr/bin/env bash
# Run a command as on a machine that lacks some programs, wherever they are on the PATH:
#
#     tools/without.sh "bwrap zsh" make test
#
# The PATH is one temporary folder with a link to every other program.
set -uo pipefail
hidden=$1
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
IFS=: read -ra places <<<"$PATH"
for ((i = ${#places[@]} - 1; i >= 0; i--)); do # the first place on the PATH wins
    [ -d "${places[i]}" ] && find "${places[i]}/" -maxdepth 1 ! -type d -exec ln -sf -t "$folder" {} +
done
# A Python that is started by a link takes the link's folder for its own, and a virtual environment keeps it.
for python in "$folder"/python*; do
    [ -e "$python" ] || continue
    real=$(readlink "$python")
    rm "$python"
    printf '#!/bin/sh\nexec "%s" "$@"\n' "$real" >"$python"
    chmod +x "$python"
done
for name in $hidden; do rm -f "$folder/$name"; done
PATH=$folder "$@"
