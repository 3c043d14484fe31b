#!/usr/bin/env bash
# A real SGLang server for the CPU, in a virtual environment of its own (3 GB, 2 minutes):
#
#     tools/setup_sglang_cpu.sh [VENV]          default .venv-sglang; a finished one is left as it is
#
# PYTHON   the Python it is made with, 3.11 or 3.12 (python3)
# SGLANG   the version of SGLang (0.5.23); one that is not in the list `versions` below is refused
# TORCH    what pip installs as torch; where that would be a CUDA build, point pip at CPU builds (PIP_EXTRA_INDEX_URL)
#
# SGLang's own requirements cannot be installed without a GPU: they name CUDA builds and kernels. So torch comes first,
# SGLang without its requirements, then those that the server imports, in the versions that SGLang's metadata asks for.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${1:-.venv-sglang}
sglang=${SGLANG:-0.5.23}
torch=${TORCH:-torch==2.13.0}
python=$venv/bin/python
marker=$venv/.sglang-cpu
log=$venv/sglang-cpu.log
wanted="sglang==$sglang $torch"
# Each was installed by this script, started, and generated before and after an update of its weights:
# tools/try_sglang.py, which also tries further ones.
versions="0.5.9 0.5.16 0.5.19 0.5.21 0.5.23"

case " $versions " in
*" $sglang "*) ;;
*)
    if [ -z "${SGLANG_UNTRIED:-}" ]; then
        echo "error: SGLANG=$sglang was never tried on a CPU. Take one of: $versions. To try it: python3 tools/try_sglang.py $sglang --new" >&2
        exit 2
    fi
    ;;
esac

alone="triton xgrammar compressed-tensors"
needed="transformers aiohttp apache-tvm-ffi blobfile distro dill einops fastapi gguf httpx interegular IPython jsonschema loguru
 msgspec openai openai-harmony orjson packaging partial_json_parser pillow prometheus-client psutil pybase64 pydantic
 python-dateutil python-multipart pyzmq regex requests scipy sentencepiece setproctitle soundfile tiktoken tqdm uvicorn
 uvloop watchfiles xxhash zstandard"

# pip says much that is no error here (that SGLang's requirements are not all met); it is shown when pip fails.
pip() { "$python" -m pip --disable-pip-version-check "$@" >>"$log" 2>&1 || fail "pip $1 $2 … failed"; }

fail() {
    tail -n 20 "$log" >&2
    echo "error: $1; its whole output is in $log" >&2
    exit 1
}

# Each name, with the version that SGLang's metadata asks for.
pinned() {
    "$python" - "$@" <<'PYTHON'
import importlib.metadata, re, sys

asked = {}
for line in importlib.metadata.requires("sglang"):
    requirement = line.partition(";")[0].strip()
    name = re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")
    if "extra ==" not in line:
        asked[name] = requirement.replace(" ", "")
print(*(asked.get(name.lower().replace("_", "-"), name) for name in sys.argv[1:]))
PYTHON
}

starts() {
    SGLANG_USE_CPU_ENGINE=1 "$python" -W ignore -c "
import importlib.metadata
assert importlib.metadata.version('sglang') == '$sglang'
import sglang, sglang.srt.entrypoints.http_server" >>"$log" 2>&1
}

finish() {
    echo "$wanted" >"$marker"
    echo "SGLang $sglang for the CPU is in $venv. Next:"
    echo "python3 arealite/launch_llm_server.py llm_server.type=sglang llm_server.sglang.python=$python llm_server.sglang.device=cpu model.path=FOLDER"
}

if [ -x "$python" ]; then
    if [ "$(cat "$marker" 2>/dev/null)" = "$wanted" ] || starts; then
        finish
        exit 0
    fi
else
    "${PYTHON:-python3}" -m venv "$venv"
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "SGLang needs Python 3.11 or newer: PYTHON=python3.12")'

rm -f "$marker" "$log"
echo "SGLang $sglang for the CPU: installing into $venv (two minutes)"
pip install "$torch" numpy setuptools
pip install --no-deps "sglang==$sglang"
pip install --no-deps $(pinned $alone)
pip install $(pinned $needed)
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp "$here/sglang_cpu_stubs.py" "$packages/"
echo "import sglang_cpu_stubs" >"$packages/sglang_cpu_stubs.pth"
starts || fail "SGLang $sglang was installed into $venv but does not start"
finish
echo "$SECONDS" >>"${INSTALL_SECONDS:-/dev/null}"
