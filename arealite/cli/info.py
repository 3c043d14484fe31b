"""`arealite info`: what is here of all that runs may use, and the command that installs the rest.

Versions are read from packages' metadata and tools' own words: what is broken must not break this.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from importlib import metadata, util
from pathlib import Path

from arealite import __version__
from arealite.api.config import ServerConfig
from arealite.base.extras import ours
from arealite.cli import configs
from arealite.cli.fold import fold

Line = tuple[str, str]
ANSWER_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Print a table; overrides say where else to look (llm_server.sglang.python)."""
    config = configs.parse(
        ServerConfig,
        argv,
        command="arealite info",
        description="Show versions, devices, back ends, extras and sandboxes; how to add the rest.",
    )
    parts = {
        "versions": versions(config.llm_server.sglang.python),
        "devices": devices(),
        "back ends": ((table.kind, ", ".join(table.names())) for table in configs.TABLES.values()),
        "extras": extras(),
        "sandbox": sandbox(),
    }
    for title, lines in parts.items():
        print(title)
        for name, text in lines:
            print(fold(f"  {name:<16} {text}"))
    return 0


def versions(sglang_python: str | None) -> Iterator[Line]:
    """Yield what is installed, and with what the rest can be; SGLang perhaps for another Python."""
    yield "arealite", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    built_for = cuda()
    yield "torch", package("torch") + (f" (CUDA {built_for})" if built_for else " (CPU only)")
    yield "transformers", package("transformers")
    if sglang_python:
        ask = "import importlib.metadata as m; print(m.version('sglang'))"
        found = said([str(Path(sglang_python).expanduser()), "-c", ask])
        yield "sglang", f"{found or 'missing'} ({sglang_python})"
    else:
        more = ", or name its Python with llm_server.sglang.python=PATH"
        yield "sglang", package("sglang") or f"missing: pip install sglang{more}"
    there = shutil.which("sinfo")
    why = "there, but `sinfo --version` fails" if there else "missing: apt-get install slurm-wlm"
    yield "slurm", said(["sinfo", "--version"]).partition("\n")[0] or why


def devices() -> Iterator[Line]:
    """Yield cores, memory and GPUs."""
    yield "CPU cores", str(os.cpu_count())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield "memory", f"{memory / 2**30:.1f} GiB"
    what = "--query-gpu=name,memory.total,driver_version"
    gpus = said(["nvidia-smi", what, "--format=csv,noheader"])
    for number, gpu in enumerate(gpus.splitlines()):
        yield f"GPU {number}", gpu + ("" if cuda() else "; unused: install a torch for CUDA")
    if not gpus:
        yield "GPUs", "none that nvidia-smi shows"


def extras() -> Iterator[Line]:
    """Yield each extra of this package: whether what it needs is there."""
    wanted = defaultdict[str, list[str]](list)
    for line in (package("arealite") and metadata.requires("arealite")) or []:
        if match := re.match(r"([\w.-]+).*extra == ['\"]([\w.-]+)", line):
            wanted[match[2]].append(match[1])
    for extra, names in wanted.items():
        absent = [name for name in names if not package(name)]
        fix = f"missing {', '.join(absent)}: pip install {ours(extra)}"
        yield extra, fix if absent else ", ".join(f"{name} {package(name)}" for name in names)
    if not wanted:
        yield "?", "arealite is not installed: pip install -e . in its folder"


def sandbox() -> Iterator[Line]:
    """Yield what confines an agent's programs here."""
    version = said(["bwrap", "--ro-bind", "/", "/", "bwrap", "--version"])
    why = "missing: apt-get install bubblewrap"
    if shutil.which("bwrap"):
        why = "there, but it may not make namespaces here: sysctl -w user.max_user_namespaces=15000"
    yield "bubblewrap", version or why


def package(name: str) -> str:
    """Return an installed package's version, "" of one that is not."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def cuda() -> str:
    """Return the version of CUDA that the installed torch was built for; "": none."""
    spec = util.find_spec("torch")
    file = Path(spec.origin or "").with_name("version.py") if spec else Path()
    found = re.search(r"^cuda.*= '([\d.]+)'", file.read_text() if file.is_file() else "", re.M)
    return found[1] if found else ""


def said(command: Sequence[str]) -> str:
    """Return what a program prints; "" where it is not there, fails, or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
