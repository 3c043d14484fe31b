"""What can be found wrong with a model for this run, before it starts and without torch.

Apart from the other checks, because they need the files of the model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from arealite.api.task import Task
from arealite.base.errors import UserError
from arealite.base.model_folder import read_json, read_shapes, vocab_size

RENAMED = re.compile(r"\.experts\.\d+\.|^language_model\.model\.")
"""Tensors that transformers fuses or renames as it loads them."""
FIRST_ROWS = 1000


def check_tensor_names(path: str) -> None:
    """Check that the trained tensors have the names under which servers know them."""
    shapes = read_shapes(Path(path).expanduser())
    if renamed := next((name for name in shapes if RENAMED.search(name)), None):
        raise UserError(
            f"model.path={path}: the trainer holds '{renamed}' under another name, or fused with "
            "others, and cannot publish it to servers. Use trainer.ppo.publisher.type=shared, or "
            "save the model anew with save_pretrained(folder, save_original_format=False)."
        )


def check_tokens(path: str, tasks: Sequence[Task]) -> None:
    """Check that the first rows whose prompt is a text become tokens that the model knows."""
    from tokenizers import Tokenizer

    file = Path(path).expanduser() / "tokenizer.json"
    rows = [task for task in tasks[:FIRST_ROWS] if isinstance(task.prompt, str)]
    size = vocab_size(read_json(path)) or 1 << 62
    if not rows or not file.is_file():
        return
    try:
        encode = Tokenizer.from_file(str(file)).encode_batch
    except Exception as error:  # tokenizers has no narrower class
        raise UserError(f"{file} cannot be read: {error}. Get it anew.") from error
    for row, encoding in zip(rows, encode([str(row.prompt) for row in rows]), strict=True):
        if not encoding.ids or max(encoding.ids) >= size:
            found = max(encoding.ids, default="no token")
            raise UserError(
                f"row {row.task_id}: the tokenizer of model.path={path} makes {found} of its "
                f"prompt; the model has {size} tokens. Remove the row, or use another tokenizer."
            )
