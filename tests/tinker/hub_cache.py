"""Fills a cache of the Hugging Face Hub, from which recipes load their models and datasets offline.

    python hub_cache.py CACHE TOKENIZER_FOLDER MODEL

MODEL gets the tokenizer of a folder. Each dataset gets a few rows with the columns of the real one.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

REVISION = "0" * 40
NUM_ROWS = 16


def put_tokenizer(cache: Path, source: Path, model: str) -> None:
    """Store the small files of a model's folder as those of a model of the Hub."""
    repo = cache / "hub" / f"models--{model.replace('/', '--')}"
    snapshot = repo / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(REVISION)
    for file in source.iterdir():
        if file.suffix in (".json", ".txt", ".jinja"):
            shutil.copy(file, snapshot)


def put_dataset(
    cache: Path, name: str, rows: list[dict[str, Any]], config: str, *splits: str
) -> None:
    """Store rows as each split of a dataset that was loaded before."""
    from datasets import DatasetInfo
    from datasets.arrow_writer import ArrowWriter
    from datasets.splits import SplitDict, SplitInfo

    owner, _, short = name.partition("/")
    stem = "".join(f"_{c.lower()}" if c.isupper() else c for c in short).lstrip("_")
    folder = cache / "datasets" / f"{owner}___{stem}" / config / "0.0.0" / "local"
    folder.mkdir(parents=True)
    infos = SplitDict(dataset_name=short)
    features = None
    for split in splits:
        with ArrowWriter(path=str(folder / f"{stem}-{split}.arrow")) as writer:
            for row in rows:
                writer.write(row)
            num_rows, num_bytes = writer.finalize()
            features = writer._features
        infos[split] = SplitInfo(split, num_bytes, num_rows, dataset_name=short)
    info = DatasetInfo(
        features=features,
        splits=infos,
        builder_name="parquet",
        dataset_name=short,
        config_name=config,
        version="0.0.0",
    )
    info.write_to_directory(str(folder))


def sums() -> list[tuple[str, str]]:
    """Return questions and answers."""
    return [(f"What is {n} + {n + 1}?", str(2 * n + 1)) for n in range(NUM_ROWS)]


def main() -> None:
    """Fill the cache."""
    cache, source = map(Path, sys.argv[1:3])
    put_tokenizer(cache, source, sys.argv[3])
    gsm8k = [{"question": q, "answer": f"Add.\n#### {a}"} for q, a in sums()]
    put_dataset(cache, "openai/gsm8k", gsm8k, "main", "train", "test")
    chats = [
        {
            "prompt": q,
            "prompt_id": q,
            "messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}],
            "category": "sums",
        }
        for q, a in sums()
    ]
    put_dataset(cache, "HuggingFaceH4/no_robots", chats, "default", "train", "test")
    pairs = [
        {
            "chosen": f"\n\nHuman: {q}\n\nAssistant: {a}",
            "rejected": f"\n\nHuman: {q}\n\nAssistant: I do not know.",
        }
        for q, a in sums()
    ]
    put_dataset(cache, "Anthropic/hh-rlhf", pairs, "default", "train", "test")
    questions = [{"question": q, "final_answer": a} for q, a in sums()]
    put_dataset(cache, "zwhe99/DeepMath-103K", questions, "default", "train")


if __name__ == "__main__":
    main()
