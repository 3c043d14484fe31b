"""Write the demo's kit: a tiny model, right in 30 % of cases, and the data of its task."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from arealite.impl.demo.sorting import make_kit


def main(argv: list[str] | None = None) -> int:
    """Make the demo's kit from the command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(argv)
    print(make_kit(options.folder, options.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
