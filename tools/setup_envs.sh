#!/usr/bin/env bash
# Debian's packages for sandboxes and the browser: installed where root runs this, else named.
set -euo pipefail
missing=()
command -v bwrap > /dev/null || missing+=(bubblewrap)
command -v chromium-headless-shell > /dev/null || missing+=(chromium-headless-shell)
[ ${#missing[@]} -eq 0 ] && exit 0
export DEBIAN_FRONTEND=noninteractive
if [ "$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq "${missing[@]}" > /dev/null; then
    echo "installed: ${missing[*]}"
else
    echo "not installed: ${missing[*]}; tests that need them are left out (apt install ${missing[*]})"
fi
