"""Imported by the warm processes of tests, after everything else: see forks.py.

A fork gets the module paths of its environment. If its command starts commands of AReaLite itself,
the fork has a warm parent for them, too.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from arealite.impl.launcher import warm_parent
from tests import forks

STARTERS = "eval", "collect", "replay"
"""Commands that start others, without a warm parent."""
PATHS = "PYTHONPATH"
_run = warm_parent.run


def run(request: warm_parent.Request) -> NoReturn:
    """Run the command of a fork; see warm_parent.run."""
    before, present = os.environ, request.environment
    replace_module_paths(before.get(PATHS, ""), present.get(PATHS, ""))
    if any(word in STARTERS for word in request.words[2:4]):
        forks.fork_here(request.environment)
    _run(request)


def replace_module_paths(before: str, present: str) -> None:
    """Replace the module paths of one environment by those of another."""
    earlier, added = (
        [os.path.abspath(path) for path in paths.split(os.pathsep)] if paths else []
        for paths in (before, present)
    )
    first = 0 if sys.flags.safe_path else 1
    others = [path for path in sys.path[first:] if path not in earlier and path not in added]
    sys.path[first:] = [*dict.fromkeys(added), *others]


warm_parent.run = run
