"""Count how often a process parses each YAML file, and checks a whole config."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from arealite.base import config as base_config
from arealite.cli import configs


def counted_loads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter, from now on, of parsed files by name and of checked configs by class."""
    counts = Counter[str]()
    load = yaml.load
    checked = base_config.load

    def counted_load(stream: Any, *args: Any, **options: Any) -> Any:
        file = getattr(stream, "name", None)
        if file or isinstance(stream, bytes):  # texts are values of overrides
            counts[Path(file or "saved").name] += 1
        return load(stream, *args, **options)

    def counted_check(schema: type, *args: Any, **options: Any) -> Any:
        counts[schema.__name__] += 1
        return checked(schema, *args, **options)

    configs._load_server.cache_clear()
    monkeypatch.setattr(yaml, "load", counted_load)
    monkeypatch.setattr(base_config, "load", counted_check)
    return counts
