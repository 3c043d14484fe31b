"""Reads what a Hugging Face folder says of its model, without loading it.

Here because client and servers ask the same, and neither may import the other.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any


def read_json(folder: Path | str, name: str = "config.json") -> dict[str, Any]:
    """Return a JSON file of a model's folder; {} where there is none to read."""
    with suppress(OSError, ValueError):
        return json.loads((Path(folder).expanduser() / name).read_text(encoding="utf-8"))
    return {}


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)


def other_model(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
    """Say in what a server's model, as far as it is told, differs from our config.json, if it
    does."""
    theirs, ours = ({**each, "vocab_size": vocab_size(each)} for each in (theirs, ours))
    for key in ("architectures", "model_type", *SIZES):
        if theirs.get(key) not in (None, []) and theirs[key] != ours.get(key):
            had = f"its {key} is {theirs[key]}, model.path has {ours.get(key)}"
            return f"it serves another model: {had}."
    return None


def vocab_size(config: dict[str, Any]) -> int | None:
    """Return how many token ids a config.json allows: its text part's, where it has one."""
    text: dict[str, Any] = config.get("text_config") or {}
    return text.get("vocab_size") or config.get("vocab_size")


def exact_length(config: dict[str, Any]) -> int | None:
    """Return up to how many tokens a row's positions do not depend on the rows computed beside it.

    None: any number. Rotary positions of types dynamic and longrope follow the longest row.
    """
    rope: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) not in ("dynamic", "longrope"):
        return None
    names = "original_max_position_embeddings", "max_position_embeddings"
    return next((each[name] for name in names for each in (rope, config) if each.get(name)), None)
