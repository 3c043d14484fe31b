"""`arealite info`: show installed versions, devices and extras, and how to install missing ones.

Versions come from package metadata and command output, so that a broken package does no harm.
"""

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
from arealite.base.extras import extra_requirement
from arealite.cli import configs
from arealite.cli.fold import fold

Line = tuple[str, str]
ANSWER_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Print the tables. Overrides: llm_server.sglang.python names the Python of SGLang."""
    about = "Show versions, devices, parts, extras, sandbox; how to install missing ones."
    config = configs.parse(ServerConfig, argv, command="arealite info", description=about)
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
    """Yield the version of each program, or how to install it.

    Args:
        sglang_python: The Python that has SGLang; None: this one.
    """
    yield "arealite", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    built_for = cuda()
    yield "torch", package("torch") + (f" (CUDA {built_for})" if built_for else " (CPU only)")
    yield "transformers", package("transformers")
    if sglang_python:
        ask = "import importlib.metadata as m; print(m.version('sglang'))"
        found = output_of([str(Path(sglang_python).expanduser()), "-c", ask])
        yield "sglang", f"{found or 'missing'} ({sglang_python})"
    else:
        fix = f"pip install {extra_requirement('sglang')}, or set llm_server.sglang.python=PATH"
        yield "sglang", package("sglang") or f"missing: {fix} to a Python that has it"
    why = "missing: apt-get install slurm-wlm"
    if shutil.which("sinfo"):
        why = "installed, but `sinfo --version` fails"
    yield "slurm", output_of(["sinfo", "--version"]).partition("\n")[0] or why


def devices() -> Iterator[Line]:
    """Yield the number of cores, the memory and the GPUs of this host."""
    yield "CPU cores", str(os.cpu_count())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield "memory", f"{memory / 2**30:.1f} GiB"
    what = "--query-gpu=name,memory.total,driver_version"
    gpus = output_of(["nvidia-smi", what, "--format=csv,noheader"])
    for number, gpu in enumerate(gpus.splitlines()):
        yield f"GPU {number}", gpu + ("" if cuda() else "; unused: install a torch for CUDA")
    if not gpus:
        yield "GPUs", "none (nvidia-smi lists no GPU)"


def extras() -> Iterator[Line]:
    """Yield each extra of this package: the versions of its packages, or how to install it."""
    wanted = defaultdict[str, list[str]](list)
    for line in (package("arealite") and metadata.requires("arealite")) or []:
        if match := re.match(r"([\w.-]+).*extra == ['\"]([\w.-]+)", line):
            wanted[match[2]].append(match[1])
    # SGLang is in "versions", and may be in a virtual environment of its own.
    wanted.pop("sglang", None)
    for extra, names in wanted.items():
        absent = [name for name in names if not package(name)]
        fix = f"missing {', '.join(absent)}: pip install {extra_requirement(extra)}"
        yield extra, fix if absent else ", ".join(f"{name} {package(name)}" for name in names)
    if not wanted:
        yield "?", "arealite is not installed: pip install -e . in its folder"


def sandbox() -> Iterator[Line]:
    """Yield the version of bubblewrap, or how to make it work."""
    why = "missing: apt-get install bubblewrap"
    if shutil.which("bwrap"):
        why = "installed, but cannot create namespaces: sysctl -w user.max_user_namespaces=15000"
    yield "bubblewrap", output_of(["bwrap", "--ro-bind", "/", "/", "bwrap", "--version"]) or why


def package(name: str) -> str:
    """Return the version of a package; "" if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def cuda() -> str:
    """Return the CUDA version of the installed torch; "" for a CPU build or without torch."""
    spec = util.find_spec("torch")
    file = Path(spec.origin or "").with_name("version.py") if spec else Path()
    found = re.search(r"^cuda.*= '([\d.]+)'", file.read_text() if file.is_file() else "", re.M)
    return found[1] if found else ""


def output_of(command: Sequence[str]) -> str:
    """Return the stdout of a command; "" if it is missing, fails, or takes over ANSWER_S."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
