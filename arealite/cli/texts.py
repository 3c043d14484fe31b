"""Longer texts that commands print (texts.toml)."""

from __future__ import annotations

import tomllib
from pathlib import Path

TEXTS: dict[str, str] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
