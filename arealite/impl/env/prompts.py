"""The texts that environments write to agents, by environment (prompts.toml)."""

from __future__ import annotations

import tomllib
from pathlib import Path

_FILE = Path(__file__).with_suffix(".toml")
PROMPTS: dict[str, dict[str, str]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
