"""Print the versions that are installed, as a constraints file for pip.

torch and what belongs to one build of it are left out: the Makefile's TORCH names the build.
"""

from __future__ import annotations

import re
from importlib.metadata import distributions

BUILDS = re.compile(r"(arealite|torch|triton|nvidia-.*|cuda-.*|pip|setuptools|wheel)")
HEAD = """# Versions that passed `make test` and `make test-extras`, on Python 3.11 and 3.13.
# Written by `make constraints`; used by make demo, make test and the like."""


def main() -> None:
    """Print one line NAME==VERSION for each distribution, sorted by name."""
    versions = {each.name.lower().replace("_", "-"): each.version for each in distributions()}
    print(HEAD)
    for name, version in sorted(versions.items()):
        if not BUILDS.fullmatch(name):
            print(f"{name}=={version}")


if __name__ == "__main__":
    main()
