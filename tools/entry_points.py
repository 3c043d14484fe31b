"""Write the entry points of pyproject.toml from the tables of entries.

    python3 tools/entry_points.py           # write them
    python3 tools/entry_points.py --check   # exit 1 if they differ from the tables

Other programs find AReaLite's parts by these entry points, and AReaLite finds those of other
packages in the same groups. A test and `make check` compare them with the tables.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "pyproject.toml"
TABLES = ("arealite/base/entries.toml", "arealite/ext/entries.toml")
BEGIN = "# Entry points, written by tools/entry_points.py.\n"
END = "# End of the entry points.\n"


def main(argv: list[str]) -> int:
    """Write the section, or compare it."""
    before = PROJECT.read_text("utf-8")
    head, _, behind = before.partition(BEGIN)
    _, _, tail = behind.partition(END)
    after = f"{head}{BEGIN}{section()}{END}{tail}"
    if before == after:
        return 0
    if "--check" in argv:
        print("pyproject.toml: entry points differ from the tables; run tools/entry_points.py")
        return 1
    PROJECT.write_text(after, "utf-8")
    return 0


def section() -> str:
    """Return the entry points of all groups as TOML."""
    groups: dict[str, dict[str, str]] = {}
    for table in TABLES:
        for group, targets in tomllib.loads((ROOT / table).read_text("utf-8")).items():
            groups.setdefault(group, {}).update(targets)
    lines = list[str]()
    for group, targets in sorted(groups.items()):
        lines.append(f'[project.entry-points."arealite.{group}"]')
        lines += [f'{name} = "{target}"' for name, target in targets.items()]
        lines.append("")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
