"""Download Gemma 3's tokenizer and convert it to a folder, for tests on a real tokenizer.

    tools/gemma.py            print the folder; without network if it exists already

arealite/ext/demo/real_models.py downloads the GGUF file of Gemma 3 270M. The folder is
out/cache/gemma-3-tokenizer (33 MB). Tests take it from tests/gemma.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools import smollm2

FOLDER = smollm2.CACHE / "gemma-3-tokenizer"


def main() -> None:
    """Print the folder of the converted tokenizer."""
    if not FOLDER.exists():
        smollm2.check_packages()
        file = smollm2.download("gemma3-270m")
        with tempfile.TemporaryDirectory(dir=smollm2.CACHE) as scratch:
            converted = Path(scratch) / "converted"
            convert(file, converted)
            converted.rename(FOLDER)  # a folder that exists is complete
    print(FOLDER)


def convert(gguf: Path, target: Path) -> None:
    """Write the tokenizer of a GGUF file into `target`, in the form of a model folder."""
    from transformers import AutoTokenizer  # here: a call for an existing folder does not need it

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(target)
    config = json.dumps({"model_type": "gemma3_text"})
    (target / "config.json").write_text(config, encoding="utf-8")


if __name__ == "__main__":
    main()
