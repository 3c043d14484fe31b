"""Read the data files of the package, which lie beside the modules that use them."""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def read_toml(module: str, name: str) -> dict[str, Any]:
    """Return the data of a TOML file beside a module, which passes its `__file__`."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))
