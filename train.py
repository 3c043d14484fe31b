"""Train: `python3 train.py trainer.ppo.lr=1e-5 …`; the same as `arealite train`."""

import sys

from arealite.cli.main import run

if __name__ == "__main__":
    sys.exit(run("arealite.cli.train", sys.argv[1:]))
