"""Serve a model: `python3 arealite/launch_llm_server.py …`; the same as `arealite serve-llm`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, Python puts this folder first on the path; the package lies one above.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from arealite.cli.main import run

    sys.exit(run("arealite.cli.serve_llm", sys.argv[1:]))
