"""The texts that environments write to agents, by environment (prompt_texts.toml)."""

from arealite.base.files import read_toml

PROMPTS: dict[str, dict[str, str]] = read_toml(__file__, "prompt_texts.toml")
