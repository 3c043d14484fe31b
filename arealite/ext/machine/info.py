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
from arealite.api.experiment_config import ServerConfig
from arealite.base.extras import extra_requirement
from arealite.base.printable import fold
from arealite.cli import configs
from arealite.cli.resolved import TABLES

InfoLine = tuple[str, str]
ANSWER_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Print the tables. Overrides: llm_server.sglang.python names the Python of SGLang, and
    llm_server.vllm.python that of vLLM."""
    config = configs.parse(
        ServerConfig,
        argv,
        command="arealite info",
        description="Show versions, devices, parts, extras, sandbox; how to install missing ones.",
    )
    parts = {
        "versions": versions(config.llm_server.sglang.python, config.llm_server.vllm.python),
        "devices": devices(),
        "back ends": ((table.kind, ", ".join(table.names())) for table in TABLES.values()),
        "extras": extras(),
        "sandbox": sandbox(),
    }
    for title, lines in parts.items():
        print(title)
        for name, line in lines:
            print(fold(f"  {name:<16} {line}"))
    return 0


def versions(sglang_python: str | None, vllm_python: str | None = None) -> Iterator[InfoLine]:
    """Yield the version of each program, or how to install it.

    Args:
        sglang_python: The Python that has SGLang; None: this one.
        vllm_python: The Python that has vLLM; None: this one.
    """
    yield "arealite", __version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    cuda_version = cuda()
    build = f" (CUDA {cuda_version})" if cuda_version else " (CPU only)"
    yield "torch", package("torch") + build
    yield "transformers", package("transformers")
    yield "sglang", _server_version("sglang", sglang_python)
    yield "vllm", _server_version("vllm", vllm_python)
    yield "slurm", _slurm_version()


def _server_version(name: str, python: str | None) -> str:
    """Return the version of a server's package in its Python, or how to install it."""
    if not python:
        installed = package(name)
        if installed:
            return installed
        return (
            f"missing: pip install {extra_requirement(name)}, "
            f"or set llm_server.{name}.python=PATH to a Python that has it"
        )
    code = f"import importlib.metadata as m; print(m.version('{name}'))"
    version = output_of([str(Path(python).expanduser()), "-c", code])
    return f"{version or 'missing'} ({python})"


def _slurm_version() -> str:
    """Return the version of Slurm, or how to install it."""
    version, _, _ = output_of(["sinfo", "--version"]).partition("\n")
    if version:
        return version
    if shutil.which("sinfo"):
        return "installed, but `sinfo --version` fails"
    return "missing: apt-get install slurm-wlm"


def devices() -> Iterator[InfoLine]:
    """Yield the number of cores, the memory and the GPUs of this host."""
    yield "CPU cores", str(os.cpu_count())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield "memory", f"{memory / 2**30:.1f} GiB"
    output = output_of(
        ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
    )
    gpus = output.splitlines()
    hint = "" if cuda() else "; unused: install a torch for CUDA"
    for number, gpu in enumerate(gpus):
        yield f"GPU {number}", gpu + hint
    if not gpus:
        yield "GPUs", "none (nvidia-smi lists no GPU)"


def extras() -> Iterator[InfoLine]:
    """Yield each extra of this package: the versions of its packages, or how to install it."""
    packages = _packages_of_extras()
    # These are in "versions", and may be in virtual environments of their own.
    for server in ("sglang", "vllm"):
        packages.pop(server, None)
    for extra, names in packages.items():
        absent = [name for name in names if not package(name)]
        if absent:
            command = f"pip install {extra_requirement(extra)}"
            yield extra, f"missing {', '.join(absent)}: {command}"
        else:
            yield extra, ", ".join(f"{name} {package(name)}" for name in names)
    if not packages:
        yield "?", "arealite is not installed: pip install -e . in its folder"


def _packages_of_extras() -> dict[str, list[str]]:
    """Return the packages of each extra; {} if arealite is not installed."""
    packages = defaultdict[str, list[str]](list)
    requirements = metadata.requires("arealite") if package("arealite") else None
    for requirement in requirements or []:
        match = re.match(r"([\w.-]+).*extra == ['\"]([\w.-]+)", requirement)
        if match:
            name, extra = match.groups()
            packages[extra].append(name)
    return packages


def sandbox() -> Iterator[InfoLine]:
    """Yield the version of bubblewrap, or how to make it work."""
    version = output_of(["bwrap", "--ro-bind", "/", "/", "bwrap", "--version"])
    if version:
        yield "bubblewrap", version
    elif shutil.which("bwrap"):
        yield (
            "bubblewrap",
            "installed, but cannot create namespaces: sysctl -w user.max_user_namespaces=15000",
        )
    else:
        yield "bubblewrap", "missing: apt-get install bubblewrap"


def package(name: str) -> str:
    """Return the version of a package; "" if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def cuda() -> str:
    """Return the CUDA version of the installed torch; "" for a CPU build or without torch."""
    spec = util.find_spec("torch")
    if spec is None:
        return ""
    version_file = Path(spec.origin or "").with_name("version.py")
    if not version_file.is_file():
        return ""
    match = re.search(r"^cuda.*= '([\d.]+)'", version_file.read_text(), re.M)
    return match[1] if match else ""


def output_of(command: Sequence[str]) -> str:
    """Return the stdout of a command; "" if it is missing, fails, or takes over ANSWER_S."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
