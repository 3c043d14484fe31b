"""Longer texts that commands print (texts.toml)."""

from arealite.base.data import read_toml

TEXTS: dict[str, str] = read_toml(__file__, "texts.toml")
