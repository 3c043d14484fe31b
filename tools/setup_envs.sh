#!/usr/bin/env bash
# Debian's packages for sandboxes and the browser: installed where root runs this, else named.
set -euo pipefail
missing=()
command -v bwrap > /dev/null || missing+=(bubblewrap)
command -v chromium-headless-shell > /dev/null || missing+=(chromium-headless-shell)
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" > /dev/null
else
    echo "not installed: ${missing[*]}; tests that need them are left out (apt install ${missing[*]})"
fi
