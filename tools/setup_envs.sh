#!/usr/bin/env bash
# Debian's packages for sandboxes and the browser: installed where root runs this, else named.
#
#     tools/setup_envs.sh LOG
#     tools/setup_envs.sh --list
#
# What apt-get prints goes to LOG, which is shown if apt-get fails. `--list` names the programs.
set -euo pipefail
declare -A package=([bwrap]=bubblewrap [chromium-headless-shell]=chromium-headless-shell)
[ "$1" = "--list" ] && echo "${!package[@]}" && exit
missing=()
for program in "${!package[@]}"; do
    command -v "$program" >/dev/null || missing+=("${package[$program]}")
done
[ ${#missing[@]} -eq 0 ] && exit
installing=$(dirname "${BASH_SOURCE[0]}")/installing.sh
export DEBIAN_FRONTEND=noninteractive
if ! { [ "$(id -u)" = 0 ] && "$installing" "Debian's lists of packages" "$1" apt-get update -qq &&
    "$installing" "${missing[*]}" "$1" apt-get install -y -qq "${missing[@]}"; }; then
    echo "not installed: ${missing[*]}; tests that need them are skipped (apt-get install ${missing[*]})"
fi
