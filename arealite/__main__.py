"""`python -m arealite COMMAND`: the same as `arealite COMMAND`."""

import sys

from arealite.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
