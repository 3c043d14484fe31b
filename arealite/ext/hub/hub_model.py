"""Downloads models of the Hugging Face hub."""

import importlib
import re
from pathlib import Path
from typing import Any

from arealite.base.errors import UserError, one_line

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def hub_folder(path: str) -> Path | None:
    """Return the folder of a Hugging Face id like Qwen/Qwen3-0.6B, which is downloaded once.

    It is a hook `model_format`. A path below an existing folder is no id: kit/modle is a misspelled
    folder if there is a kit.

    Returns:
        None: `path` is no id.

    Raises:
        UserError: There is no such folder, and the hub has no such model or cannot be reached.
    """
    if not HUB_ID.fullmatch(path) or Path(path).parent.exists():
        return None
    hub: Any = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(path, allow_patterns=HUB_FILES))
    except (OSError, ValueError) as error:
        reason = one_line(error).rstrip(".")
        raise UserError(
            f"model.path={path} is no folder here, and no model of the Hugging Face hub "
            f"that can be read ({reason:.200}). "
            "Name a folder, or download the model where a network is."
        ) from error
