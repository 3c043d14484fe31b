"""Write the demo's model and data to a folder: `arealite quickstart --kit FOLDER` in a checkout."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from arealite.cli.main import run

    sys.exit(run("arealite.ext.demo.quickstart", ["--kit", *sys.argv[1:]]))
