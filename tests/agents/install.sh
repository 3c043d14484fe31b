#!/usr/bin/env bash
# Install the clients of `make test-agents` into a virtual environment, with npm also the programs:
#
#     tests/agents/install.sh VENV LOG
#
# camel-ai bounds pydantic below what other clients need, and works with theirs. It is installed
# first, and its dependencies are updated after it.
set -euo pipefail
venv=$1 log=$2 here=$(dirname "$0")
pip=("$venv/bin/python" -m pip install --disable-pip-version-check)
installing() { tools/installing.sh "$1 into $venv" "$log" "${@:2}"; }
installing "camel-ai" "${pip[@]}" "camel-ai>=0.2.90,<0.3"
installing "agent libraries" "${pip[@]}" -r "$here/requirements.txt"
# verifiers has other bounds of openai and mcp.
"$venv/bin/python" -m venv "$venv/verifiers"
installing "verifiers" "$venv/verifiers/bin/python" -m pip install --disable-pip-version-check \
    "verifiers>=0.4,<0.5"
if command -v npm >/dev/null; then
    installing "claude-code and codex" npm install --no-audit --no-fund --prefix "$venv" \
        "@anthropic-ai/claude-code@2.1.197" "@openai/codex@0.169.0"
    # npm does not run the install script, which links the program of this platform.
    (cd "$venv/node_modules/@anthropic-ai/claude-code" && node install.cjs) >>"$log" 2>&1
fi
